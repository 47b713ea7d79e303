# KVPAGE_HAS_CUDA: is there a CUDA compiler that works?
#
# check_language() compiles nothing with the caller's settings and survives a compiler that is missing or broken;
# enable_language() would end the configuration. It is asked for only what it was found able to do.
set(KVPAGE_HAS_CUDA OFF)
if(NOT KVPAGE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    include("${CMAKE_CURRENT_LIST_DIR}/architectures.cmake")
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    enable_language(CUDA)
    find_package(CUDAToolkit)
    if(TARGET CUDA::cudart_static)
      set(KVPAGE_HAS_CUDA ON)
    endif()
  endif()
  if(KVPAGE_CUDA STREQUAL "ON" AND NOT KVPAGE_HAS_CUDA)
    message(FATAL_ERROR "KVPAGE_CUDA=ON needs a working CUDA compiler with the static CUDA runtime and none was found; "
                        "install nvcc, name it with CUDACXX, or build with KVPAGE_CUDA=OFF.")
  endif()
endif()

