# From a clean checkout to a wheel, an image that runs the demo, and a reproducible test run:
#
#     docker build --tag flash_ext .                        # then: docker run --rm [--gpus all] flash_ext
#     docker build --target wheel --output dist .           # the wheel alone, manylinux_2_28
#     docker build --target test .                          # make test; the build fails where a test does
#
# Images are named by tag; for the same bytes every time give them by digest, e.g.
# --build-arg BUILD_IMAGE=quay.io/pypa/manylinux_2_28_x86_64@sha256:... Packages from PyPI come with their hashes
# (packaging/lock.py writes the lists), CUTLASS's headers with the hash in cmake/toolchain.py; nothing comes from apt.
ARG BUILD_IMAGE=quay.io/pypa/manylinux_2_28_x86_64:2025.09.28-1
ARG RUNTIME_IMAGE=python:3.12.11-slim-bookworm
ARG TEST_IMAGE=python:3.12.11-bookworm

# ----------------------------------------------------------------------------------------------------------------------
# glibc 2.28, g++ 14 and every CPython; nvcc comes from PyPI.
FROM ${BUILD_IMAGE} AS build
SHELL ["/bin/bash", "-e", "-o", "pipefail", "-c"]
# Not every builder gives a folder that WORKDIR makes to USER.
RUN useradd --uid 1000 --create-home builder \
 && install --directory --owner=1000 --group=1000 /home/builder/flash_ext
USER 1000
WORKDIR /home/builder/flash_ext
COPY --chown=1000 packaging/requirements-build.txt packaging/
RUN /opt/python/cp312-cp312/bin/python -m venv /home/builder/venv \
 && /home/builder/venv/bin/python -m pip install --no-cache-dir --no-deps --require-hashes \
      --requirement packaging/requirements-build.txt
COPY --chown=1000 . .
ARG FLASH_EXT_PATHS=sm80,sm90,sm100
ARG FLASH_EXT_PYTHONS=/opt/python/cp310-cp310/bin/python,/opt/python/cp311-cp311/bin/python,/opt/python/cp312-cp312/bin/python,/opt/python/cp313-cp313/bin/python
ARG FLASH_EXT_JOBS=
RUN SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) \
 && export SOURCE_DATE_EPOCH FLASH_EXT_PATHS FLASH_EXT_PYTHONS FLASH_EXT_JOBS \
 && /home/builder/venv/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir build/wheel . \
 && auditwheel repair --only-plat --plat manylinux_2_28_x86_64 --wheel-dir dist build/wheel/*.whl

FROM scratch AS wheel
COPY --from=build /home/builder/flash_ext/dist/ /

# ----------------------------------------------------------------------------------------------------------------------
# g++, make and git, without a CUDA toolkit: the test command takes what it needs.
FROM ${TEST_IMAGE} AS test
RUN useradd --uid 1000 --create-home tester \
 && install --directory --owner=1000 --group=1000 /home/tester/flash_ext
USER 1000
WORKDIR /home/tester/flash_ext
COPY --chown=1000 . .
ARG FLASH_EXT_TORCH=torch==2.13.0
ARG FLASH_EXT_PATHS=
ARG FLASH_EXT_JOBS=
ARG PYTEST_ARGS=
RUN export FLASH_EXT_TORCH FLASH_EXT_PATHS FLASH_EXT_JOBS \
 && make test PYTEST_ARGS="${PYTEST_ARGS}"

# ----------------------------------------------------------------------------------------------------------------------
# The wheel, torch and the demo's packages.
FROM ${RUNTIME_IMAGE} AS runtime
RUN useradd --uid 1000 --create-home user \
 && python -m venv /opt/flash_ext \
 && chown 1000 /opt/flash_ext --recursive
USER 1000
WORKDIR /home/user
ENV PATH=/opt/flash_ext/bin:$PATH
COPY packaging/requirements-image.txt /tmp/
RUN python -m pip install --no-cache-dir --no-deps --require-hashes --requirement /tmp/requirements-image.txt
COPY --from=build /home/builder/flash_ext/dist/ /tmp/wheel/
RUN python -m pip install --no-cache-dir --no-deps --no-index /tmp/wheel/*.whl && python -m flash_ext info
CMD ["python", "-m", "flash_ext", "demo"]
