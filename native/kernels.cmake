# The kernel tables of a processor family: sets kernel_sources, with each one's instruction set, and the options that
# all native code is compiled with.
set(exact -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden)
set(kernel_sources)

function(headrace_kernels name)
  set(source ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/kernels/${name}.cpp)
  set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${ARGN}")
  set(kernel_sources ${kernel_sources} ${source} PARENT_SCOPE)
endfunction()

headrace_kernels(scalar)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 -mavx512vbmi -mavx2 -mfma -mf16c
    -mprefer-vector-width=512)
  headrace_kernels(avx2 -mavx2 -mfma -mf16c)
  headrace_kernels(avx512 ${avx512})
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-mamx-int8 HEADRACE_COMPILES_AMX)
  if(HEADRACE_COMPILES_AMX AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    headrace_kernels(amx ${avx512} -mamx-tile -mamx-int8)
    set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/dispatch.cpp PROPERTIES COMPILE_DEFINITIONS HEADRACE_HAS_AMX)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  headrace_kernels(neon_dot -march=armv8.2-a+dotprod)
  headrace_kernels(neon_i8mm -march=armv8.2-a+dotprod+i8mm)
endif()
