// Compiler and platform switches. The only header besides arch/arch.cuh that looks at __CUDA_ARCH__.
#pragma once

#if !defined(__CUDACC__) && !(defined(_MSVC_LANG) ? _MSVC_LANG >= 201703L : __cplusplus >= 201703L)
#error "kernels needs C++17 or later"
#endif

#define KERNELS_VERSION_MAJOR 0
#define KERNELS_VERSION_MINOR 1
#define KERNELS_VERSION_PATCH 0

// KERNELS_HD: callable from host and device, always inlined (the functor chains are only free when they inline).
#if defined(__CUDACC__)
#define KERNELS_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define KERNELS_HD inline __attribute__((always_inline))
#elif defined(_MSC_VER)
#define KERNELS_HD __forceinline
#else
#define KERNELS_HD inline
#endif

// The same for functions and lambdas of the host alone.
#if defined(__GNUC__)
#define KERNELS_INLINE __attribute__((always_inline))
#else
#define KERNELS_INLINE
#endif

// Of variables, and classes of them, that each shared library has for itself: it may be unloaded, and its kernels with it.
#if defined(__GNUC__)
#define KERNELS_OF_THIS_LIBRARY __attribute__((visibility("hidden")))
#else
#define KERNELS_OF_THIS_LIBRARY
#endif

// Defined while device code is being compiled: chooses between a CUDA intrinsic and its portable twin.
#if defined(__CUDA_ARCH__)
#define KERNELS_DEVICE_CODE 1
#endif

#if defined(KERNELS_DEVICE_CODE)
#define KERNELS_UNROLL _Pragma("unroll")
#define KERNELS_ROLLED _Pragma("unroll 1")
#else
#define KERNELS_UNROLL
#define KERNELS_ROLLED
#endif

// The CUDA storage types (__half ...) are used wherever their headers can be found; otherwise the library's own,
// which have the same bits. The two worlds are different types, so they get different symbol names.
#if !defined(KERNELS_CUDA_TYPES)
#if defined(__CUDACC__)
#define KERNELS_CUDA_TYPES 1
#elif defined(__has_include)
#if __has_include(<cuda_fp16.h>) && __has_include(<cuda_bf16.h>) && __has_include(<cuda_fp8.h>)
#define KERNELS_CUDA_TYPES 1
#endif
#endif
#endif
#if !defined(KERNELS_CUDA_TYPES)
#define KERNELS_CUDA_TYPES 0
#endif

// A versioned inline namespace: two versions, or two flavours, of the library in one process do not clash.
#if KERNELS_CUDA_TYPES
#define KERNELS_ABI v0_1_cuda
#else
#define KERNELS_ABI v0_1_own
#endif

// Tuning for Intel, GCC prefers vectors of 256 bits and moves those of 512, which the code asks for, by halves through memory: a
// product of floats on a Xeon ran at a twentieth of its speed.
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define KERNELS_WIDE_VECTORS _Pragma("GCC push_options") _Pragma("GCC target(\"prefer-vector-width=512\")")
#define KERNELS_USUAL_VECTORS _Pragma("GCC pop_options")
#else
#define KERNELS_WIDE_VECTORS
#define KERNELS_USUAL_VECTORS
#endif

// g++ 9 warns of parameters that only a branch of `if constexpr` uses which is not taken.
#if defined(__GNUC__) && __GNUC__ < 10 && !defined(__clang__) && !defined(__CUDACC__)
#define KERNELS_QUIET                                                                           \
  _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wunused-but-set-parameter\"") \
  _Pragma("GCC diagnostic ignored \"-Wunused-but-set-variable\"")
#define KERNELS_USUAL_WARNINGS _Pragma("GCC diagnostic pop")
#else
#define KERNELS_QUIET
#define KERNELS_USUAL_WARNINGS
#endif

#define KERNELS_BEGIN KERNELS_QUIET KERNELS_WIDE_VECTORS namespace kernels { inline namespace KERNELS_ABI {
#define KERNELS_END } } KERNELS_USUAL_VECTORS KERNELS_USUAL_WARNINGS
