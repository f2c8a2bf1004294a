// What decode() does on the host: which body takes the call, and its launch.
#pragma once

#include "../exec.cuh"
#include "decode_plain.cuh"
#include "decode_tensor.cuh"

KERNELS_BEGIN

// How decode() multiplies.
enum class DecodeMode {
  automatic,   // precise where it can be, otherwise plain
  plain,       // CUDA cores, all in float
  tensor,      // tensor cores, weights rounded to 16 bits
  precise,     // tensor cores, weights (and queries that are not of the keys' type) in two parts of 16 bits: as good as float
};

namespace detail {

// Blocks that share the work, at most.
inline int decode_blocks(const Exec& ex) { return 2 * ex.device().sm_count; }
// A few less, if items of equal length are then cut evenly, or not at all, or in no more parts than are merged at a time.
inline int even_blocks(int64_t items, int most) {
  const int64_t parts = most / items, even = items > most ? items / ((items + most - 1) / most) : items * (parts > 32 ? parts / 32 * 32 : parts);
  return even * 16 >= int64_t(most) * 15 ? int(even) : most;
}
// Rows that are worked on together: 8, or where there are more as many as registers allow with heads of up to `dim` columns.
constexpr int decode_rows(int64_t rows, int64_t dim) { return rows <= 8 || dim > 256 ? 8 : dim > 128 ? 16 : 32; }

// f(size) for the first of these head sizes that has room for `dim` columns, or else the last. If kLargest > 0, which dim does not
// exceed, that stands for dim, and the others are not compiled.
template <int kLargest, int kFirst, int... kOthers, class F>
Status with_head_size(int dim, const F& f) {
  constexpr std::integral_constant<int, kFirst> size{};
  if constexpr (sizeof...(kOthers) == 0 || (kLargest > 0 && kLargest <= kFirst)) {
    return f(size);
  } else {
    if constexpr (kLargest == 0) {
      if (dim <= kFirst) return f(size);
    }
    return with_head_size<kLargest, kOthers...>(dim, f);
  }
}

// kLargest: how large a head can be, or 0 if that is known at run time only.
template <class P, int kLargest>
class DecodeEngine {
  static constexpr int kMany = 32;  // rows

 public:
  DecodeEngine(const Exec& ex, P& problem) : ex_(ex), p_(problem) {}

  Status run(DecodeMode mode) {
    constexpr bool coded = narrow_kv<typename P::Kv>;
    const bool fits = coded && aligned();
    if (mode == DecodeMode::automatic) mode = fits ? DecodeMode::precise : DecodeMode::plain;
    if (mode != DecodeMode::plain && !fits) return unsupported("decode: tensor cores take keys and values of 16, 8 or 4 bits, in rows that begin and end at multiples of 16 bytes");
    if constexpr (coded) {
      if (mode == DecodeMode::precise) return tensor<2>();
      if (mode == DecodeMode::tensor) return tensor<1>();
    }
    return plain();
  }

 private:
  // Rows begin, and end, at multiples of 16 bytes.
  bool aligned() const {
    return p_.dim % widest_of<typename KeyRun<typename P::Kv>::Codes>() == 0 && p_.v_dim % widest_of<typename ValueRun<typename P::Kv>::Codes>() == 0 && key_pack(p_.kv) >= widest_of<typename KeyRun<typename P::Kv>::Codes>() && value_pack(p_.kv) >= widest_of<typename ValueRun<typename P::Kv>::Codes>();
  }

  template <int kParts>
  Status tensor() {
    return with_head_size<kLargest, 64, 128, 256, 576>(greater(p_.dim, p_.v_dim), [this](auto size) {
      constexpr int kDim = size(), kVDim = kDim < 512 ? kDim : 512, kTiles = decode_rows(kMany, kDim) / 8;
      using Few = TensorRows<P, kDim, kVDim, 1, kParts>;
      using Many = TensorRows<P, kDim, kVDim, kTiles, kParts>;
      return p_.shape.q_len * p_.group <= 8 ? start_tensor<Few>() : start_tensor<Many>();
    });
  }
  template <class Rows>
  Status start_tensor() {
    using Body = DecodeBody<P, Rows>;
    int image = 0;
    KERNELS_TRY(image_architecture<Body>(ex_, image));
    return start<Body>(Rows::warps_of(image), Rows::shared_bytes(image), 1);
  }
  Status plain() {
    return with_head_size<kLargest, 128, 256, 512>(p_.v_dim, [this](auto size) { return plain_of<size() / 128>(); });
  }
  template <int kChunks>
  Status plain_of() {
    using Rows = PlainRows<P, kChunks>;
    return start<DecodeBody<P, Rows>>(Rows::warps, Rows::shared_bytes(p_), 2);
  }

  template <class Body>
  Status start(int warps, size_t shared, int blocks_each) {
    p_.tile_rows = Body::kRows;
    p_.tiles = int((p_.shape.q_len * p_.group + p_.tile_rows - 1) / p_.tile_rows);
    p_.blocks = even_blocks(p_.shape.batch * p_.shape.kv_heads * p_.tiles * greater(1, p_.splits), blocks_each * ex_.device().sm_count);
    Launch how;
    how.threads = 32 * warps;
    how.shared = shared;
    how.grid.x = unsigned(p_.blocks);
    return launch<Body>(ex_, how, p_);
  }

  const Exec& ex_;
  P& p_;
};

// What blocks leave: counters, the states of parts, then their outputs. Each block leaves two parts at most, unless items are cut in
// a fixed number of them.
struct DecodeRoom {
  size_t counters, states, outputs;
  DecodeRoom(int blocks, const AttentionShape& shape, int splits) {
    const int64_t rows = shape.q_len * shape.group(), groups = shape.batch * shape.kv_heads;
    const int64_t tile_rows = decode_rows(rows, greater(shape.dim, shape.value_dim()));
    const auto tiles_of = [&](int64_t height) { return (rows + height - 1) / height; };
    const size_t left = size_t(splits > 0 ? splits * groups * tiles_of(tile_rows) : 2 * blocks) * size_t(tile_rows);
    counters = (size_t(splits > 0 ? groups * tiles_of(8) : blocks) * sizeof(unsigned long long) + 15) / 16 * 16;
    states = splits == 1 ? 0 : left * sizeof(float2);
    outputs = splits == 1 ? 0 : left * size_t(greater<int64_t>(0, shape.value_dim())) * sizeof(float);
  }
  size_t bytes() const { return counters + states + outputs; }
};

template <int kLargest, class Q, class Kv, class Out, class S>
Status start_decode(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score, const Workspace& workspace, const Attention& options, DecodeMode mode) {
  using Problem = DecodeProblem<Q, Kv, S, Out>;
  char* const memory = static_cast<char*>(workspace.ptr);
  Problem problem(q, kv, score, out, shape, options);
  problem.scale = options.scale_for(shape.dim);
  problem.dim = int(shape.dim), problem.v_dim = int(shape.value_dim()), problem.group = int(shape.group());
  problem.q_pack = max_pack_of(q), problem.kv_pack = lesser(key_pack(kv), value_pack(kv)), problem.out_pack = max_pack_of(out);
  problem.splits = options.fixed_splits();
  const DecodeRoom room(decode_blocks(ex), shape, problem.splits);
  problem.counters = reinterpret_cast<unsigned long long*>(memory);
  problem.states = reinterpret_cast<float2*>(memory + room.counters);
  problem.outputs = reinterpret_cast<float*>(memory + room.counters + room.states);
  return DecodeEngine<Problem, kLargest>(ex, problem).run(mode);
}

}  // namespace detail
KERNELS_END
