// Compiler and platform switches. The only header besides arch/arch.cuh that looks at __CUDA_ARCH__.
#pragma once

#if !(defined(_MSVC_LANG) ? _MSVC_LANG >= 201703L : __cplusplus >= 201703L)
#error "kernels needs C++17 or later"
#endif

#define KERNELS_VERSION_MAJOR 0
#define KERNELS_VERSION_MINOR 1
#define KERNELS_VERSION_PATCH 0

// KERNELS_HD: callable from host and device, always inlined (functor chains are only free when they inline). Where
// nothing is optimized that only makes more code: KERNELS_UNOPTIMIZED leaves inlining on the host to the compiler,
// which takes a half to four fifths of the time.
#if defined(__CUDACC__)
#define KERNELS_HD __host__ __device__ __forceinline__
#elif defined(KERNELS_UNOPTIMIZED)
#define KERNELS_HD inline
#elif defined(__GNUC__)
#define KERNELS_HD inline __attribute__((always_inline))
#elif defined(_MSC_VER)
#define KERNELS_HD __forceinline
#else
#define KERNELS_HD inline
#endif

// KERNELS_INLINE: the same for host-only functions and lambdas.
#if defined(__GNUC__) && !defined(KERNELS_UNOPTIMIZED)
#define KERNELS_INLINE __attribute__((always_inline))
#else
#define KERNELS_INLINE
#endif

// KERNELS_OF_THIS_LIBRARY: hidden visibility, for what each shared library must have for itself. Variables, as the
// library and its kernels may be unloaded; and functions that call the CUDA runtime, as each shared library may have
// its own runtime, which knows only that library's kernels. The loader must not replace such a function by another
// library's.
#if defined(__GNUC__)
#define KERNELS_OF_THIS_LIBRARY __attribute__((visibility("hidden")))
#else
#define KERNELS_OF_THIS_LIBRARY
#endif

// Defined while device code is compiled: selects a CUDA intrinsic or its portable equivalent.
#if defined(__CUDA_ARCH__)
#define KERNELS_DEVICE_CODE 1
#endif

// Whether the target GPU has fp8 conversion instructions.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define KERNELS_HAS_FP8 0
#else
#define KERNELS_HAS_FP8 1
#endif

// KERNELS_CALLED: device functions that are called, as inlining them everywhere would make too much code. With
// -rdc=true a caller cannot limit their registers, and a kernel with a register limit of its own may not call them, so
// they are inlined.
#if defined(__CUDACC_RDC__)
#define KERNELS_CALLED __forceinline__
#else
#define KERNELS_CALLED __noinline__
#endif

#if defined(KERNELS_DEVICE_CODE)
#define KERNELS_UNROLL _Pragma("unroll")
#define KERNELS_ROLLED _Pragma("unroll 1")
#else
#define KERNELS_UNROLL
#define KERNELS_ROLLED
#endif

// CUDA's storage types (__half ...) are used if their headers can be found, otherwise the library's own with the same
// bits. They are different types, so the two variants have different symbol names.
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

// Everything is in an inline namespace named after what the code depends on: the version, the storage types, the host's
// instruction set, floating-point freedom (-ffast-math and its parts, as far as macros tell), and the source of
// threads. Files compiled with different flags thus keep their own code in one program, however the linker merges
// inline functions, and a program can choose between them at run time (examples/dispatch_cpu.cpp). Status and the
// storage types are shared by all instruction sets: their functions are always inlined. Pass only plain types between
// such files otherwise.
#if KERNELS_CUDA_TYPES
#define KERNELS_ABI v0_1_cuda
#else
#define KERNELS_ABI v0_1_own
#endif

#if defined(__AVX512F__)
#define KERNELS_ISA_NAME avx512
#elif defined(__AVX2__)
#define KERNELS_ISA_NAME avx2
#elif defined(__AVX__)
#define KERNELS_ISA_NAME avx
#elif defined(__SSE4_1__)
#define KERNELS_ISA_NAME sse4
#else
#define KERNELS_ISA_NAME base
#endif
#if defined(__FMA__)
#define KERNELS_ISA_FMA _fma
#else
#define KERNELS_ISA_FMA
#endif
#if defined(__F16C__)
#define KERNELS_ISA_F16C _f16c
#else
#define KERNELS_ISA_F16C
#endif
#if defined(__BMI2__)
#define KERNELS_ISA_BMI2 _bmi2
#else
#define KERNELS_ISA_BMI2
#endif
#if defined(__AVX512BW__)
#define KERNELS_ISA_BW _bw
#else
#define KERNELS_ISA_BW
#endif
#if defined(__AVX512DQ__)
#define KERNELS_ISA_DQ _dq
#else
#define KERNELS_ISA_DQ
#endif
#if defined(__AVX512VL__)
#define KERNELS_ISA_VL _vl
#else
#define KERNELS_ISA_VL
#endif
#if defined(__AVX512BF16__)
#define KERNELS_ISA_BF16 _bf16
#else
#define KERNELS_ISA_BF16
#endif
#if defined(__AVX512VNNI__)
#define KERNELS_ISA_VNNI _vnni
#else
#define KERNELS_ISA_VNNI
#endif
#if defined(__AVX512VBMI__)
#define KERNELS_ISA_VBMI _vbmi
#else
#define KERNELS_ISA_VBMI
#endif
#if defined(__FAST_MATH__)
#define KERNELS_MATH_NAME _fast
#elif defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ > 0
#define KERNELS_MATH_NAME _finite
#elif defined(__GCC_IEC_559) && __GCC_IEC_559 == 0  // old versions of GCC have only this macro for what follows
#define KERNELS_MATH_NAME _loose
#else
#define KERNELS_MATH_NAME
#endif
#if defined(__ASSOCIATIVE_MATH__)
#define KERNELS_MATH_ASSOCIATIVE _associative
#else
#define KERNELS_MATH_ASSOCIATIVE
#endif
#if defined(__RECIPROCAL_MATH__)
#define KERNELS_MATH_RECIPROCAL _reciprocal
#else
#define KERNELS_MATH_RECIPROCAL
#endif
#if defined(__NO_SIGNED_ZEROS__)
#define KERNELS_MATH_ZEROS _unsigned_zeros
#else
#define KERNELS_MATH_ZEROS
#endif
#if defined(__ROUNDING_MATH__)
#define KERNELS_MATH_ROUNDING _rounding
#else
#define KERNELS_MATH_ROUNDING
#endif
#if defined(_OPENMP)
#define KERNELS_THREADS_NAME _omp
#else
#define KERNELS_THREADS_NAME
#endif
#define KERNELS_JOIN16_(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) a##b##c##d##e##f##g##h##i##j##k##l##m##n##o##p
#define KERNELS_JOIN16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
  KERNELS_JOIN16_(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
#define KERNELS_ISA                                                                                        \
  KERNELS_JOIN16(KERNELS_ISA_NAME, KERNELS_ISA_FMA, KERNELS_ISA_F16C, KERNELS_ISA_BMI2, KERNELS_ISA_BW,    \
                 KERNELS_ISA_DQ, KERNELS_ISA_VL, KERNELS_ISA_BF16, KERNELS_ISA_VNNI, KERNELS_ISA_VBMI,     \
                 KERNELS_MATH_NAME, KERNELS_MATH_ASSOCIATIVE, KERNELS_MATH_RECIPROCAL, KERNELS_MATH_ZEROS, \
                 KERNELS_MATH_ROUNDING, KERNELS_THREADS_NAME)

// -ffast-math lets a compiler reorder sums. In clang, KERNELS_SUMS_IN_ORDER at the beginning of a function forbids it;
// for other compilers KERNELS_REORDERS_SUMS says whether they may reorder. Old versions of GCC only tell that some such
// flag is set.
#if defined(__clang__) && __clang_major__ >= 12 && !defined(__CUDACC__)
#define KERNELS_SUMS_IN_ORDER _Pragma("clang fp reassociate(off)")
#define KERNELS_REORDERS_SUMS 0
#else
#define KERNELS_SUMS_IN_ORDER
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || (defined(__GCC_IEC_559) && __GCC_IEC_559 == 0)
#define KERNELS_REORDERS_SUMS 1
#else
#define KERNELS_REORDERS_SUMS 0
#endif
#endif

// When tuning for Intel, GCC prefers 256-bit vectors and moves 512-bit ones, which the code asks for, in halves through
// memory: a product of floats on a Xeon ran at a twentieth of its speed. The pragma comes last because GCC 14 drops
// what follows such a pragma in a macro.
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define KERNELS_WIDE_VECTORS _Pragma("GCC push_options") _Pragma("GCC target(\"prefer-vector-width=512\")")
#define KERNELS_USUAL_VECTORS _Pragma("GCC pop_options")
#else
#define KERNELS_WIDE_VECTORS
#define KERNELS_USUAL_VECTORS
#endif

// g++ 9 warns about parameters that are only used in an `if constexpr` branch that is not taken.
#if defined(__GNUC__) && __GNUC__ < 10 && !defined(__clang__) && !defined(__CUDACC__)
#define KERNELS_QUIET                                                                           \
  _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wunused-but-set-parameter\"") \
  _Pragma("GCC diagnostic ignored \"-Wunused-but-set-variable\"")
#define KERNELS_USUAL_WARNINGS _Pragma("GCC diagnostic pop")
#else
#define KERNELS_QUIET
#define KERNELS_USUAL_WARNINGS
#endif

#define KERNELS_BEGIN               \
  KERNELS_QUIET namespace kernels { \
    inline namespace KERNELS_ABI {  \
    inline namespace KERNELS_ISA {  \
    KERNELS_WIDE_VECTORS
#define KERNELS_END } } } KERNELS_USUAL_VECTORS KERNELS_USUAL_WARNINGS

// For what all instruction sets share.
#define KERNELS_SHARED_BEGIN namespace kernels { inline namespace KERNELS_ABI {
#define KERNELS_SHARED_END } }
