#!/bin/bash
# Builds the wheel of a commit twice, from clones in folders of different names and lengths, and compares the bytes.
#
#     packaging/reproducible.sh [COMMIT]          # default: HEAD
#
# Takes FLASH_EXT_PATHS, FLASH_EXT_PYTHONS, FLASH_EXT_JOBS and so on like every build. Each build runs in pip's isolation,
# in an environment of its own, and without ccache: nothing is taken from the other.
set -euo pipefail
umask 022 # the modes of files are in the wheel

root=$(cd "$(dirname "$0")/.." && pwd)
commit=$(git -C "$root" rev-parse "${1:-HEAD}^{commit}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export CCACHE_DISABLE=1
SOURCE_DATE_EPOCH=$(git -C "$root" show --no-patch --format=%ct "$commit")
export SOURCE_DATE_EPOCH

for name in one another-one; do
  git clone --quiet "$root" "$folder/$name"
  git -C "$folder/$name" checkout --quiet --detach "$commit"
  start=$SECONDS
  "${PYTHON:-python3}" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir "$folder/$name/dist" "$folder/$name"
  echo "$((SECONDS - start)) s: $(cd "$folder/$name/dist" && sha256sum ./*.whl)"
done

cd "$folder"
if cmp one/dist/*.whl another-one/dist/*.whl; then
  echo "the wheels of $commit are identical"
else
  for name in one another-one; do
    mkdir "$name/unpacked" && "${PYTHON:-python3}" -m zipfile --extract "$name"/dist/*.whl "$name/unpacked"
  done
  diff --recursive --brief one/unpacked another-one/unpacked || true
  echo "the wheels of $commit DIFFER" >&2
  exit 1
fi
