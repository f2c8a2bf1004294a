// The calls on the CPU. CMake compiles this file for each instruction set, with its flags and UNIT=scalar, avx2, avx512
// or vnni: once for rows, once for the products of each type of weights (WEIGHTS=f16 and so on), and once for the
// attention of each type of keys and values (CACHE=f16).
//
// Only this file includes the library's CPU half, and it uses nothing else. Templates of the standard library, for
// example, would be the same symbols in all objects, and the linker might keep code that the machine cannot run.
#include <kernels/append.h>
#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/layernorm.h>
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/norm_heads.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/cpu/router.h>
#include <kernels/cpu/sampling.h>
#include <kernels/embed.h>
#include <kernels/rope.h>

#include "device/elements.h"

namespace llm {
namespace k = kernels;
namespace on = kernels::cpu;

namespace {
constexpr Type kActivations = Type::f32;
[[maybe_unused]] constexpr unsigned kNeeds = on::kNeeds;
on::Exec exec(const Place& place, int64_t = 1) { return on::Exec{place.threads}; }
[[maybe_unused]] on::Exec for_product(const Place& place, int64_t) { return exec(place); }
[[maybe_unused]] on::Exec for_attention(const Place& place, int64_t) { return exec(place); }
[[maybe_unused]] size_t decode_bytes(const Place&, const k::AttentionShape& shape, const k::Attention&) {
  return on::decode_workspace_bytes(shape);
}
[[maybe_unused]] constexpr bool kSplitsChunks = false;
[[maybe_unused]] size_t chunk_bytes(const Place&, const k::AttentionShape&, const k::Attention&) { return 0; }
[[maybe_unused]] on::MatmulPolicy policy(const Place& place) {
  on::MatmulPolicy out;
  out.batch_invariant = place.invariant;
  return out;
}
// Calls layernorm() or rmsnorm(), according to the type of the options.
template <class In, class Out, class Options>
k::Status normalize(const Place& place, const In& in, const Out& out, int64_t rows, int64_t cols, const Options& norm) {
  if constexpr (std::is_same<Options, k::LayerNorm>::value)
    return on::layernorm(exec(place), in, out, rows, cols, norm);
  else
    return on::rmsnorm(exec(place), in, out, rows, cols, norm);
}
#if defined(WEIGHTS)
constexpr Type kWeights = Type::WEIGHTS, kCaches[] = {Type::f32, Type::f16, Type::bf16};
constexpr bool kFolds = false;
constexpr int64_t kDecodesFrom = 0;
template <class X, class W, class Out>
k::Status many_rows(const Place& place, const X& x, const W& w, const Out& out, const k::MatmulShape& shape) {
  return on::matmul(exec(place), x, w, out, shape, policy(place));
}
bool takes_codes(const Place&) { return bits_of(kWeights) == 8; }  // dequantized: slower, but shows the effect
#elif defined(CACHE)
constexpr Type kCaches[] = {Type::CACHE};
#else
constexpr Type kCaches[] = {Type::f32, Type::f16, Type::bf16, Type::f8, Type::i8};
#endif
}  // namespace

#include "device/calls.inl"

#if defined(WEIGHTS)
#include "device/products.inl"
#elif defined(CACHE)
#include "device/attend.inl"
#else
namespace {
const char* read_all(const Place& place, const void* from, size_t bytes, uint32_t* out) {
  const uint64_t* const words = static_cast<const uint64_t*>(from);
  k::detail::host::parallel_shares(exec(place).team(), int64_t(bytes / 4096), [&](int64_t first, int64_t last) {
    uint64_t sums[64] = {};
    for (int64_t i = first * 512; i < last * 512; i += 64) {
      for (int j = 0; j < 64; ++j) sums[j] ^= words[i + j];
    }
    for (int j = 1; j < 64; ++j) sums[0] ^= sums[j];
    if (sums[0] == 0x123456789) *out = 1;  // so that the compiler keeps the reads
  });
  return nullptr;
}
}  // namespace
#include "device/rows.inl"
#endif

}  // namespace llm
