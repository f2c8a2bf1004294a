// The host side of decode(): chooses the kernel for a call, and launches it.
#pragma once

#include "../../core/attention_plan.h"
#include "../../exec.cuh"
#include "../../tuning/attention.h"
#include "decode_plain.cuh"
#include "decode_short.cuh"
#include "decode_tensor.cuh"

KERNELS_BEGIN
namespace detail {

// Whether the kernel for short sequences is compiled: keys and values of 16 bits, without scales.
template <class Kv>
constexpr bool takes_short() {
  if constexpr (narrow_kv<Kv>) {
    return is_16_bit<typename Coded<typename KeyRun<Kv>::Codes>::Code> &&
           is_16_bit<typename Coded<typename ValueRun<Kv>::Codes>::Code> && !KeyRun<Kv>::scaled &&
           !ValueRun<Kv>::scaled;
  } else {
    return false;
  }
}

// The most blocks of a launch.
inline int decode_blocks(const Exec& ex) { return 2 * ex.device().sm_count; }
// Fewer than `most` blocks, if this splits items of equal length evenly, or not at all, or in no more parts than are
// merged at a time. Only then do row tiles of the same keys read them at the same time. H200, 32 heads over 8 of 128
// columns, half, 240 blocks and 264: 5 sequences of 2,048 keys 17.5 and 19.7 us, of 8,192 45.7 and 47.8; 192 and 264:
// 12 sequences 30.2 and 31.2, 102.5 and 98.4, but in three tiles of 12 queries 4 sequences 22.5 and 29.7, 66.4 and 102.
inline int even_blocks(int64_t items, int tiles, int most) {
  const int64_t parts = most / items, even = items > most ? items / ((items + most - 1) / most)
                                                          : items * (parts > 32 ? parts / 32 * 32 : parts);
  return even * 16 >= int64_t(most) * (tiles > 1 ? 11 : 12) ? int(even) : most;
}
// Rows of a tile, for heads of up to `dim` columns.
constexpr int decode_rows(int64_t rows, int64_t dim) {
  return rows <= 8 ? 8 : rows <= 16 && head_size(dim).decode_rows > 16 ? 16 : head_size(dim).decode_rows;
}

// kLargest: the largest head dimension, or 0 if it is known at run time only. kAnyMode: whether the caller may choose a
// mode; otherwise it is automatic, and four kernels less are compiled.
template <class P, int kLargest, bool kAnyMode>
class DecodeEngine {
 public:
  // With a plan: describes the call instead of launching it.
  DecodeEngine(const Exec& ex, P& problem, AttentionPlan* plan) : ex_(ex), p_(problem), plan_(plan) {}

  Status run(DecodeMode mode) {
    const char* misfit = kv_misfit<Kv>(key_pack(p_.kv) >= widest_of<Key>(), value_pack(p_.kv) >= widest_of<Value>());
    if (*misfit == '\0' && p_.dim % widest_of<Key>() != 0) misfit = why_not::keys_end;
    if (*misfit == '\0' && p_.v_dim % widest_of<Value>() != 0) misfit = why_not::values_end;
    const bool fits = *misfit == '\0';
    if (mode != DecodeMode::automatic && mode != DecodeMode::plain && !fits) {
      return unsupported(
          "decode: tensor cores take keys and values of 16, 8 or 4 bits, in rows that begin and end at multiples of 16 bytes");
    }
    if (plan_ != nullptr) plan_->why_not = fits && mode == DecodeMode::plain ? why_not::mode : misfit;
    automatic_ = mode == DecodeMode::automatic;
    if (automatic_) mode = fits ? DecodeMode::precise : DecodeMode::plain;
    if constexpr (takes_short<Kv>()) {
      if (mode == DecodeMode::precise && may_be_short()) {
        bool taken = false;
        const Status status = short_sequences(taken);
        if (taken || !status) return status;
      }
    }
    if constexpr (narrow_kv<typename P::Kv>) {
      if (mode == DecodeMode::precise) return tensor<2>();
      if constexpr (kAnyMode) {
        if (mode == DecodeMode::tensor) return tensor<1>();
      }
    }
    return plain();
  }

 private:
  using Kv = typename P::Kv;
  using Key = typename KeyRun<Kv>::Codes;
  using Value = typename ValueRun<Kv>::Codes;

  // The tiles of `height` rows that a KV head of a sequence has. A row is a query of one of the heads that share keys.
  int64_t row_tiles(int height) const { return (p_.shape.q_len * p_.group + height - 1) / height; }

  // Whether the kernel for short sequences might take the call.
  bool may_be_short() const {
    using Body = ShortDecodeBody<P, 64>;
    constexpr int most_dim = kLargest == 0 || kLargest > kMostShortDim ? kMostShortDim : kLargest;
    constexpr int64_t most_keys = tuning::kShortTilesOfCluster * Body::kMostBlocks * Body::kWarps * kDecodeKeys;
    const int64_t keys = p_.options.expected_keys(),
                  items = p_.shape.batch * p_.shape.kv_heads * row_tiles(Body::kRows);
    return keys > 0 && keys <= most_keys && items <= Body::kBlocksOnEach * ex_.device().sm_count && p_.splits == 0 &&
           p_.dim <= most_dim && p_.v_dim <= most_dim && p_.q_pack >= wide_pack<typename P::Q>;
  }
  // Launches it, and sets `taken`, if a warp then has only a few tiles of keys.
  Status short_sequences(bool& taken) {
    return with_head_size<kLargest, kMostShortDim>(
        greater(p_.dim, p_.v_dim), [&](auto size) -> Status {
          using Body = ShortDecodeBody<P, size()>;
          p_.tile_rows = Body::kRows, p_.tiles = int(row_tiles(Body::kRows));
          Launch how;
          KERNELS_TRY(size_clusters<Body>(how, taken));
          if (!taken) return {};
          if (plan_ == nullptr) {
            if constexpr (is_kv_cache<Kv>) {
              if (early()) return launch<ShortDecodeBody<P, size(), true>>(ex_, how, p_);
            }
            return launch<Body>(ex_, how, p_);
          }
          plan_->path = AttentionPath::precise;
          plan_->tile_dim = plan_->tile_v_dim = size();
          plan_->query_pack = wide_pack<typename P::Q>, plan_->key_pack = plan_->value_pack = 8;
          plan_->tile_rows = lesser(int(p_.shape.q_len) * p_.group, Body::kRows),
          plan_->tile_keys = Body::kWarps * kDecodeKeys;
          plan_->heads_together = true;
          plan_->blocks = how.grid.x * how.grid.y, plan_->splits = how.cluster;
          plan_->result_pack = p_.out_pack >= 4 ? 4 : 1;
          return {};
        });
  }
  // A cluster has as many blocks as there are keys for, as long as all clusters are resident at the same time: where
  // one of 32 clusters of 4 blocks had to wait, 32 heads with 1,024 keys took 15.0 us instead of 10.9 (H200).
  template <class Body>
  Status size_clusters(Launch& how, bool& taken) const {
    const int64_t keys = p_.options.expected_keys(), heads = p_.shape.batch * p_.shape.kv_heads,
                  items = heads * p_.tiles, tile = Body::kWarps * kDecodeKeys;
    const int rows = lesser(int(p_.shape.q_len) * p_.group, Body::kRows);
    int image = 0;
    KERNELS_TRY(image_architecture<Body>(ex_, image));
    const bool clusters = ex_.device().capability >= 90 && image >= 90;
    how.threads = Body::max_threads;
    how.shared = Body::shared_bytes(rows, 1);
    while (clusters && how.cluster < Body::kMostBlocks && how.cluster * tile < keys) {
      Launch more = how;
      more.cluster *= 2;
      more.shared = Body::shared_bytes(rows, more.cluster);
      more.grid.x = unsigned(heads * more.cluster), more.grid.y = unsigned(p_.tiles);
      int64_t resident = 0;
      if (items * more.cluster > Body::kBlocksOnEach * ex_.device().sm_count ||
          !resident_clusters<Body>(ex_, more, resident).ok() || items > resident)
        break;
      how = more;
    }
    how.grid.x = unsigned(heads * how.cluster), how.grid.y = unsigned(p_.tiles);
    const int most = p_.tiles == 2                       ? tuning::kShortTilesOfTwo
                     : p_.tiles == 1 && how.cluster >= 8 ? tuning::kShortTilesOfCluster
                                                         : tuning::kShortTiles;
    taken = keys <= most * how.cluster * tile;
    return {};
  }

  template <int kParts>
  Status tensor() {
    return with_head_size<kLargest>(greater(p_.dim, p_.v_dim), [this](auto size) {
      constexpr HeadSize kSize = head_size(size());
      using Few = TensorRows<P, kSize.dim, kSize.v_dim, 1, kParts>;
      constexpr int kTeams = kSize.decode_teams;
      using Many = TensorRows<P, kSize.dim, kSize.v_dim, kSize.decode_rows / 8 / kTeams, kParts, 1, kTeams>;
      using Some = std::conditional_t<(kSize.decode_rows > 16), TensorRows<P, kSize.dim, kSize.v_dim, 2, kParts>, Many>;
      const int64_t rows = p_.shape.q_len * p_.group;
      if constexpr (pairs_heads<Few, kSize.dim>()) {
        constexpr bool four_bits = Few::Keys::kPack == 32 && Few::Values::kPack == 32;
        constexpr int parts = four_bits ? tuning::kPairParts4 : tuning::kPairParts8;
        if (rows <= 4 && p_.group % 2 == 0 && p_.kv_heads % 2 == 0 && p_.splits == 0 &&
            ex_.device().sm_count <= parts * (p_.shape.batch * p_.kv_heads / 2))
          return start_tensor<TensorRows<P, kSize.dim, kSize.v_dim, 1, kParts, 2>>();
      }
      // With 128 columns: tiles of 16 rows, however many, if all run at the same time, even if the number of keys is
      // unknown. They read the same keys at about the same time, from the L2. H200 (CUDA 13.0, 2026-11, ad hoc
      // benchmark), half, 32 heads over 8, 8 queries, two tiles and one tile of two teams: 8,192 keys 22 and 34 us,
      // 32,769 keys 48 and 58, but 131,072 keys 145 to 205 and 151.
      const bool tiles_of_16 = kSize.dim == 128 ? few_keys_or_unknown() && at_once(16) : two_tiles(rows, 16);
      if (rows <= 8 || two_tiles(rows, 8)) return start_tensor<Few>();
      return rows <= 16 || tiles_of_16 ? start_tensor<Some>() : start_tensor<Many>();
    });
  }
  // Whether two tiles of `height` rows are faster than one of twice as many; and below, whether all tiles of a height
  // run at the same time. Not with a fixed number of splits: then a sequence has the same tiles in every batch.
  bool two_tiles(int64_t rows, int height) const {
    return rows <= 2 * height && p_.options.expected_keys() > 0 && few_keys_or_unknown() && at_once(height);
  }
  bool few_keys_or_unknown() const { return p_.options.expected_keys() <= tuning::kKeysOfTwoTiles; }
  bool at_once(int height) const {
    return p_.splits == 0 && p_.shape.batch * p_.kv_heads * row_tiles(height) <= ex_.device().sm_count;
  }
  // Whether a tile may have the rows of two KV heads: for quantized caches, whose rows are short. The rows of two heads
  // together fill a line of memory, and fewer rows of the tile are empty. Not for codes that may be NaN or infinite:
  // the zeros that separate the heads would carry them over to the other head.
  template <class Rows, int kDim>
  static constexpr bool pairs_heads() {
    return is_kv_cache<Kv> && is_finite_code<typename Rows::Keys::Code> &&
           is_finite_code<typename Rows::Values::Code> && kDim <= 128;
  }
  template <class Rows>
  Status start_tensor() {
    int image = 0;
    KERNELS_TRY((image_architecture<DecodeBody<P, Rows>>(ex_, image)));
    if (Rows::shared_bytes(image) + Rows::kStatic > ex_.device().shared_per_block) {
      if (!automatic_)
        return unsupported(
            "decode: tensor cores need more shared memory than this device has, in code that was compiled for another");
      if (plan_ != nullptr) plan_->why_not = why_not::shared;
      return plain();
    }
    if (plan_ != nullptr) plan_->path = Rows::parts == 2 ? AttentionPath::precise : AttentionPath::tensor;
    p_.group *= Rows::heads, p_.kv_heads /= Rows::heads;
    return start<Rows>(Rows::warps_of(image), Rows::shared_bytes(image), 1);
  }
  Status plain() {
    return with_head_size<kLargest>(
        p_.v_dim, [this](auto size) { return plain_of<(head_size(size()).v_dim + 127) / 128>(); });
  }
  template <int kChunks>
  Status plain_of() {
    using Rows = PlainRows<P, kChunks>;
    p_.wide_kv = key_pack(p_.kv) >= Rows::key_pack && value_pack(p_.kv) >= Rows::value_pack;
    return start<Rows>(Rows::warps, Rows::shared_bytes(p_), 2);
  }

  template <class Rows>
  Status start(int warps, size_t shared, int blocks_each) {
    p_.tile_rows = Rows::rows;
    p_.tiles = int(row_tiles(p_.tile_rows));
    p_.blocks = even_blocks(p_.shape.batch * p_.kv_heads * p_.tiles * greater(1, p_.splits), p_.tiles,
                            blocks_each * ex_.device().sm_count);
    if (plan_ != nullptr) return describe<Rows>(warps);
    Launch how;
    how.threads = 32 * warps;
    how.shared = shared;
    how.grid.x = unsigned(p_.blocks);
    // With more tokens the next product reads its weights through shared memory instead of the L1.
    how.holds_dependents = Rows::fills_shared && p_.shape.batch * p_.shape.q_len <= 2;
    if constexpr (Rows::fills_early) {
      if (early()) return launch<DecodeBody<P, Rows, true>>(ex_, how, p_);
    }
    return launch<DecodeBody<P, Rows>>(ex_, how, p_);
  }
  // Whether old keys are loaded before the previous kernel has ended, which takes separate kernels.
  bool early() const { return ex_.programmatic() && p_.options.old_keys_ready(); }
  template <class Rows>
  Status describe(int warps) {
    Rows::describe(p_, *plan_);
    plan_->tile_rows = Rows::rows, plan_->tile_keys = warps / Rows::Steps::teams * Rows::Steps::tiles * kDecodeKeys;
    plan_->heads_together = true;
    plan_->blocks = p_.blocks, plan_->splits = p_.splits;
    plan_->result_pack = p_.out_pack >= 4 ? 4 : 1;
    return {};
  }

  const Exec& ex_;
  P& p_;
  AttentionPlan* plan_;
  bool automatic_ = false;
};

// The layout of the workspace: counters, then the softmax states of parts, then their outputs. Each block stores at
// most two parts, unless the number of splits is fixed.
struct DecodeWorkspace {
  size_t counters, states, outputs;
  DecodeWorkspace(int blocks, const AttentionShape& shape, int splits) {
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

// With a plan: describes the call, which needs no workspace.
template <int kLargest, bool kAnyMode, class Q, class Kv, class Out, class S>
Status start_decode(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                    const S& score, const Workspace& workspace, const Attention& options, DecodeMode mode,
                    AttentionPlan* plan = nullptr) {
  using Problem = DecodeProblem<Q, Kv, S, Out>;
  char* const memory = static_cast<char*>(workspace.ptr);
  Problem problem(q, kv, score, out, shape, options);
  problem.scale = options.scale_for(shape.dim);
  problem.dim = int(shape.dim), problem.v_dim = int(shape.value_dim());
  problem.kv_heads = int(shape.kv_heads), problem.group = int(shape.group());
  problem.q_pack = max_pack_of(q), problem.out_pack = max_pack_of(out);
  problem.splits = options.fixed_splits();
  const DecodeWorkspace room(decode_blocks(ex), shape, problem.splits);
  problem.counters = reinterpret_cast<unsigned long long*>(memory);
  problem.states = reinterpret_cast<float2*>(memory + room.counters);
  problem.outputs = reinterpret_cast<float*>(memory + room.counters + room.states);
  return DecodeEngine<Problem, kLargest, kAnyMode>(ex, problem, plan).run(mode);
}

}  // namespace detail
KERNELS_END
