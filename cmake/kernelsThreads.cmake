# How the CPU kernels run in parallel: OpenMP where the compiler has it, else the system's threads.
# Decided where the library is used, not where it was installed, so the package runs this file as well.
function(kernels_link_threads target)
  find_package(OpenMP QUIET COMPONENTS CXX)
  if(OpenMP_CXX_FOUND)
    target_link_libraries(${target} INTERFACE $<BUILD_INTERFACE:OpenMP::OpenMP_CXX>)
    # OpenMP_CXX gives its flag to C++ files only; a .cu file that includes the CPU headers must see the same library.
    string(REPLACE " " "," flags "${OpenMP_CXX_FLAGS}")
    target_compile_options(${target} INTERFACE
      $<BUILD_INTERFACE:$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-Xcompiler=${flags}>>)
  else()
    set(THREADS_PREFER_PTHREAD_FLAG ON)
    find_package(Threads REQUIRED)
    target_link_libraries(${target} INTERFACE $<BUILD_INTERFACE:Threads::Threads>)
  endif()
endfunction()
