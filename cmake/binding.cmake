# flash_ext._C: the pybind11 module, for the Python that FLASH_EXT_PYTHON names. It includes no torch header and links no
# CUDA library: it loads a path's library at run time.

set(PYBIND11_FINDPYTHON ON)
set(Python_EXECUTABLE "${FLASH_EXT_PYTHON}")
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 REQUIRED CONFIG)

file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/binding/*.cpp")

# NO_EXTRAS: no link-time optimisation, whose symbol names are random.
pybind11_add_module(_C MODULE NO_EXTRAS ${sources})
target_include_directories(_C PRIVATE "${CMAKE_SOURCE_DIR}/csrc")
target_link_libraries(_C PRIVATE ${CMAKE_DL_LIBS})
set_target_properties(_C PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")

# One unit: pybind11's headers cost 9 of the 10 s that a source takes, and every Python of a wheel compiles them.
set_target_properties(_C PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)

# FLASH_EXT_BUILD_INFO changes with every commit: only the sources that use it are compiled again.
foreach(source IN LISTS sources)
  file(STRINGS "${source}" uses REGEX "FLASH_EXT_BUILD_INFO" LIMIT_COUNT 1)
  if(uses)
    set_source_files_properties("${source}" PROPERTIES
      SKIP_UNITY_BUILD_INCLUSION ON
      COMPILE_OPTIONS "-include;${CMAKE_BINARY_DIR}/build_info.h"
      OBJECT_DEPENDS "${CMAKE_BINARY_DIR}/build_info.h")
  endif()
endforeach()
