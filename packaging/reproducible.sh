#!/bin/bash
# Builds the wheel of a commit twice, from clones in folders of different names and lengths, and compares the bytes.
#
#     packaging/reproducible.sh [COMMIT [FOLDER]]          # default: HEAD; FOLDER gets what was measured, and the wheel
#
# Takes FLASH_EXT_PATHS, FLASH_EXT_PYTHONS, FLASH_EXT_JOBS and so on like every build. Each build runs in pip's isolation,
# in an environment of its own, and without ccache: nothing is taken from the other, and their times are those of a build
# from a clean clone. FOLDER: build.txt (times, sizes, hashes), compile_times.md, and the wheel, with auditwheel's tag where
# PYTHON has auditwheel.
set -euo pipefail
umask 022 # the modes of files are in the wheel

root=$(cd "$(dirname "$0")/.." && pwd)
commit=$(git -C "$root" rev-parse "${1:-HEAD}^{commit}")
results=${2:+$(mkdir -p "$2" && cd "$2" && pwd)}
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export CCACHE_DISABLE=1
export FLASH_EXT_GLIBC=${FLASH_EXT_GLIBC-2.28} # as make wheel
SOURCE_DATE_EPOCH=$(git -C "$root" show --no-patch --format=%ct "$commit")
export SOURCE_DATE_EPOCH

{
  echo "commit $commit"
  echo "$(nproc) threads, load $(cut -d' ' -f1-3 /proc/loadavg) before; $(env | grep ^FLASH_EXT_ | sort | tr '\n' ' ')"
} | tee "$folder/build.txt"
TIMEFORMAT='%0R s wall clock, %0U s user, %0S s system' # of the build and all that it starts
for name in one another-one; do
  git clone --quiet "$root" "$folder/$name"
  git -C "$folder/$name" checkout --quiet --detach "$commit"
  { time "$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir "$folder/$name/dist" "$folder/$name"; } \
    2> >(tee -a "$folder/build.txt")
  (cd "$folder/$name/dist" && sha256sum ./*.whl && stat --format='%s bytes' ./*.whl) | tee -a "$folder/build.txt"
done

cd "$folder"
if ! cmp one/dist/*.whl another-one/dist/*.whl; then
  for name in one another-one; do
    mkdir "$name/unpacked" && "$python" -m zipfile --extract "$name"/dist/*.whl "$name/unpacked"
  done
  diff --recursive --brief one/unpacked another-one/unpacked || true
  echo "the wheels of $commit DIFFER" >&2
  exit 1
fi
echo "the wheels of $commit are identical" | tee -a build.txt
[ -n "$results" ] || exit 0
cp build.txt "$results/"
# FLASH_EXT_PATHS=none compiles no kernel.
if compgen -G 'one/build/*/manifest.json' >/dev/null; then
  "$python" one/cmake/compile_times.py --build "$folder/one/build" "$results/compile_times.md"
fi
if "$python" -m auditwheel --version >/dev/null 2>&1; then
  "$python" -m auditwheel repair --only-plat --plat "manylinux_${FLASH_EXT_GLIBC/./_}_x86_64" --wheel-dir "$results" one/dist/*.whl
else
  cp one/dist/*.whl "$results/"
fi
