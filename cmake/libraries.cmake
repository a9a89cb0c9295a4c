# libflash_ext_<path>.so: units (one kernel each, compiled by cmake/compile_unit.py), csrc/api and the generated registry.

# Dependency files of units name absolute paths, so CMake need not rewrite them; rewriting would put CMake's own folder into
# every command, and a unit would be compiled again whenever that folder changes (each isolated build has another).
cmake_policy(SET CMP0116 OLD)

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# Every unit of every path; what decides the object's bytes stands here, not in cmake/compile_unit.py, so that a change
# compiles the units again. Not --use_fast_math: lse is exact to fp32, kernels name the fast instructions they want.
set(unit_flags
  -std=c++20 -O3 --compress-mode=size
  -Icsrc
  -Xcompiler -fPIC,-fvisibility=hidden,-Wall)
if(FLASH_EXT_LINEINFO)
  list(APPEND unit_flags -lineinfo)
endif()

file(GLOB api_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/api/*.cpp")

foreach(path IN LISTS FLASH_EXT_PATHS)
  set(path_dir "${FLASH_EXT_BUILD_DIR}/${path}")
  # From csrc/kernels.toml: unit_gencode, unit_needs_cutlass, and the names and sources of the units.
  include("${path_dir}/units.cmake")

  set(objects)
  foreach(unit source IN ZIP_LISTS units unit_sources)
    set(folder "${path_dir}/units/${unit}")
    file(RELATIVE_PATH relative_folder "${CMAKE_SOURCE_DIR}" "${folder}")
    # `source` is relative to the source folder, where the command runs. cudafe++ would make it absolute and put its hash
    # into the name of every internal variable (libcu++ has some): it is given the relative one once more.
    add_custom_command(
      OUTPUT "${folder}/${unit}.o"
      BYPRODUCTS "${folder}/${unit}.ptx" "${folder}/report.json"
      COMMAND "${FLASH_EXT_BUILD_DIR}/toolchain/compile_unit"
              --unit "${unit}" --source "${source}" --folder "${relative_folder}"
              "$<$<BOOL:${unit_needs_cutlass}>:--cutlass>" --
              ${unit_flags} -gencode "${unit_gencode}" "-frandom-seed=${unit}"
              -Xcudafe "--orig_src_path_name,${source}"
      DEPENDS "${CMAKE_SOURCE_DIR}/${source}" "${FLASH_EXT_BUILD_DIR}/toolchain/fingerprint.txt"
      DEPFILE "${folder}/${unit}.d"
      WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}"
      COMMENT "${unit}"
      VERBATIM COMMAND_EXPAND_LISTS)
    list(APPEND objects "${folder}/${unit}.o")
  endforeach()

  add_library(flash_ext_${path} SHARED ${api_sources} "${path_dir}/generated/registry.cpp" ${objects})
  target_compile_definitions(flash_ext_${path} PRIVATE FLASH_EXT_PATH_NAME="${path}")
  target_include_directories(flash_ext_${path} PRIVATE "${CMAKE_SOURCE_DIR}/csrc")
  target_include_directories(flash_ext_${path} SYSTEM PRIVATE "${FLASH_EXT_CUDA_INCLUDE}")
  target_link_libraries(flash_ext_${path} PRIVATE "${FLASH_EXT_CUDART}" Threads::Threads ${CMAKE_DL_LIBS} rt)
  target_link_options(flash_ext_${path} PRIVATE
    "-Wl,--version-script=${CMAKE_SOURCE_DIR}/cmake/exports.map" -Wl,--as-needed -Wl,--no-undefined)
  set_target_properties(flash_ext_${path} PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${path_dir}"
    LINK_DEPENDS "${CMAKE_SOURCE_DIR}/cmake/exports.map")
endforeach()
