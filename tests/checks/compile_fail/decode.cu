// FAILS LARGER_THAN_ANY: from 1 to 576
// FAILS NEGATIVE: from 1 to 576
// FAILS SCALES_OF_A_BYTE: scales are float, half or bfloat16
// FAILS SCALES_OF_DOUBLE: scales are float, half or bfloat16
#include <kernels/attention.cuh>

namespace k = kernels;

#if defined(LARGER_THAN_ANY)
constexpr int largest = 600;
#elif defined(NEGATIVE)
constexpr int largest = -1;
#else
constexpr int largest = 64;
#endif

#if defined(SCALES_OF_A_BYTE)
using Scale = k::float8_e4m3;
#elif defined(SCALES_OF_DOUBLE)
using Scale = double;
#else
using Scale = float;
#endif

k::Status f(cudaStream_t stream, const k::half* p, const Scale* scales, k::half* o, k::Workspace workspace) {
  const auto side = k::nhd(p, 16, 1, 64).head_scales(scales);
  return k::decode<largest>(stream, k::load(p, 64), k::dense_kv(side, side, 16), k::store(o, 64), {1, 1, 1, 1, 64},
                            k::no_mask(), workspace);
}
