// FAILS LARGER_THAN_ANY: from 1 to 576
// FAILS NEGATIVE: from 1 to 576
#include <kernels/attention.cuh>

namespace k = kernels;

#if defined(LARGER_THAN_ANY)
constexpr int largest = 600;
#elif defined(NEGATIVE)
constexpr int largest = -1;
#else
constexpr int largest = 64;
#endif

k::Status f(cudaStream_t stream, const k::half* p, k::half* o) {
  const auto side = k::nhd(p, 16, 1, 64);
  return k::attention<largest>(stream, k::load(p, 64), k::dense_kv(side, side, 16), k::store(o, 64), {1, 1, 1, 1, 64},
                               k::no_mask());
}
