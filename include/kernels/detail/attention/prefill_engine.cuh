// Host side of prefill: chooses the kernel, launches it and, with split keys, the merge kernel, and describes the plan
// of a call.
#pragma once

#include "../../core/attention_plan.h"
#include "../uninitialized.cuh"
#include "prefill.cuh"
#include "prefill_hopper.cuh"
#include "prefill_latent.cuh"
#include "prefill_simt.cuh"

KERNELS_BEGIN
namespace detail {

// The mma.sync kernel for heads of at most kMost columns. kReplaced: in code for sm_90a, the one for kMostHopperDim
// columns takes the place of smaller ones, so that fewer kernels are compiled.
template <class P, int kMost, bool kReplaced = false>
struct PrefillTile {
  static constexpr bool replaced = kReplaced && kMost < kMostHopperDim;
  static constexpr HeadSize kSize = head_size(kMost);
  using Body =
      PrefillBody<P, kSize.warps, kSize.tiles, kSize.keys, kSize.dim, kSize.cols, kSize.stages, 255, replaced>;
};
template <class P>
struct PrefillTile<P, 0> {  // any number of columns, on CUDA cores
  using Body = SimtPrefillBody<P>;
};
// The replacement. Its type depends on the replaced tile, as otherwise the compiler would instantiate it for others
// too.
template <class Tile>
struct InsteadOf;
template <class P, int kMost, bool kReplaced>
struct InsteadOf<PrefillTile<P, kMost, kReplaced>> : PrefillTile<P, kMostHopperDim> {};
template <class Tile>
using PrefillInstead = typename InsteadOf<Tile>::Body;

// The kernel for sm_90a, where there is one.
template <class P, int kDim>
constexpr HeadSize::Hopper hopper_size = decodes_kv<typename P::Kv> ? head_size(kDim).decoded : head_size(kDim).copied;
template <class P, int kDim>
using HopperBody = HopperPrefillBody<P, kDim, kDim, hopper_size<P, kDim>.keys, hopper_size<P, kDim>.groups>;

// The same for values with fewer columns than the keys (DeepSeek: 192, and values of 128), which leaves shared memory
// for tiles of twice as many keys.
template <class P, int kMost>
using HopperBodyNarrow = HopperPrefillBody<P, kMost / 4 * 3, kMost / 2, 128, 2>;

// Whether a kernel for sm_90a can take the call, if the loaded image has its code.
template <class Hopper, class P>
bool fits_hopper(const Exec& ex, const P& p) {
  return p.shape.dim <= Hopper::kDim && p.shape.value_dim() <= Hopper::kCols && p.wide_keys && p.wide_values &&
         ex.device().shared_per_block >= Hopper::kSharedBytes;
}

// The same with products of 8 bits, for heads of up to 128 columns: three groups and 96 keys take 2 to 11 % less time
// from 2,048 keys on than two groups and 128 keys (H200). kMost, of the tile that it replaces, is only there to make
// the type dependent.
template <class P, int kMost>
using HopperBody8 = HopperPrefillBody<P, (kMost > 128 ? kMost : 128), (kMost > 128 ? kMost : 128), 96, 3, true>;
// Whether it can take the call.
template <class P>
bool fits_8_bits(const P& p) {
  const int64_t dim = p.shape.dim, cols = p.shape.value_dim();
  return p.options.wants_8_bits() && dim <= 128 && cols <= 128 && dim % 16 == 0 && cols % 16 == 0 &&
         max_pack_of(p.q) >= 16 && key_pack(p.kv) >= 16 && value_pack(p.kv) >= 16;
}

// Whether the kernel for latents can take the call.
template <class Body, class P>
Status fits_latent(const Exec& ex, const P& p, bool& fits) {
  fits = false;
  if (p.shape.dim != Body::kDim || p.shape.value_dim() != Body::kCols || !p.wide_keys || !p.wide_values) return {};
  const int64_t column = value_column(p.kv);
  if ((column != 0 && column != 64) || ex.device().shared_per_block < Body::kSharedBytes) return {};
  return has_code<Body>(ex, fits);
}

// Whether a kernel can use TMA.
template <class Body, class = void>
constexpr bool uses_tma = false;
template <class Body>
constexpr bool uses_tma<Body, void_t<std::enable_if_t<Body::kUsesTma>>> = true;

template <class Body_>
struct ChosenPrefill {
  using Body = Body_;
};

// Calls f(PrefillTile) with the smallest that heads fit into. kLargest: the largest head, or 0 if it is known only at
// run time.
template <class P, int kLargest, class F>
Status with_prefill_tile(const AttentionShape& shape, const F& f) {
  if constexpr (!narrow_kv<typename P::Kv>) {
    return f(PrefillTile<P, 0>{});
  } else {
    return with_head_size<kLargest>(greater(shape.dim, shape.value_dim()),
                                    [&](auto size) { return f(PrefillTile<P, size(), kLargest == 0>{}); });
  }
}

// Calls f with the body that a call takes. It is the one for sm_90a whenever that can take the call, as the bits of a
// sequence must not depend on how long others are. H200, bench_prefill: 1.3 to 2.1 times as fast as mma.sync at 16,384
// keys, 1.1 to 1.4 times at 512. In code for sm_90a, unaligned keys have a single kernel, so that calls compile sooner.
template <class P, int kLargest, class F>
Status with_prefill_body(const Exec& ex, const P& p, const F& f) {
  return with_prefill_tile<P, kLargest>(p.shape, [&](auto tile) {
    using Body = typename decltype(tile)::Body;
    if constexpr (copies_e4m3<P> && Body::kDim <= 128) {
      using Hopper = HopperBody8<P, Body::kDim>;
      bool there = false;
      KERNELS_TRY(has_code<Hopper>(ex, there));
      if (there && fits_8_bits(p) && ex.device().shared_per_block >= Hopper::kSharedBytes)
        return f(ChosenPrefill<Hopper>{});
    }
    if constexpr (copies_kv<P> && Body::kDim == kMostHopperDim) {
      using Hopper = HopperBodyNarrow<P, Body::kDim>;
      bool there = false;
      KERNELS_TRY(has_code<Hopper>(ex, there));
      if (there && fits_hopper<Hopper>(ex, p)) return f(ChosenPrefill<Hopper>{});
    }
    if constexpr (has_hopper_prefill<P, Body::kDim>) {
      using Hopper = HopperBody<P, Body::kDim>;
      bool there = false;
      KERNELS_TRY(has_code<Hopper>(ex, there));
      if (there && fits_hopper<Hopper>(ex, p)) return f(ChosenPrefill<Hopper>{});
      if constexpr (decltype(tile)::replaced) {
        if (there) return f(ChosenPrefill<PrefillInstead<decltype(tile)>>{});
      }
    }
    if constexpr (has_latent_prefill<P, Body::kDim>) {
      using Latent = LatentPrefillBody<P, Body::kDim>;
      bool fits = false;
      KERNELS_TRY(fits_latent<Latent>(ex, p, fits));
      if (fits) return f(ChosenPrefill<Latent>{});
    }
    return f(ChosenPrefill<Body>{});
  });
}

// Merge kernel for split keys: an item is 128 columns of a row, and a warp merges its splits. kTogether: if a block has
// few items, all of its warps share the splits of each, and one warp merges their results. This is not done for a fixed
// number of splits, as the number of a block's items depends on the batch, and the last bits would, too.
template <class P, bool kTogether = false>
struct PrefillMerge {
  static constexpr int max_threads = 256, registers = 128, kWarps = max_threads / 32, kBlocksOnEach = 2, kCols = 128;
  static constexpr int kAtOnce = 8;        // splits that are read at a time
  static constexpr int kMostTogether = 2;  // the most items of a block that all of its warps merge
  using Params = P;
  using State = AttentionState<float, 4>;

  // How many warps have an item.
  static KERNELS_HD int64_t items(const P& p, int64_t rows) {
    return rows * ((p.shape.value_dim() + kCols - 1) / kCols);
  }

  // A warp looks at 32 items at a time, among the rows of all splits. Only items of a first split have something to
  // merge.
  static __device__ __forceinline__ void run(const P& p) {
    const int64_t all = items(p, *p.parts.count), step = int64_t(gridDim.x) * kWarps;
    KERNELS_ROLLED
    for (int64_t base = 0; base < all; base += 32 * step) {
      const auto item = [&](int warp, int i) { return base + i * step + int64_t(warp) * gridDim.x + blockIdx.x; };
      const int64_t mine = item(threadIdx.x / 32, threadIdx.x % 32);
      PartialResults::Row row = {};
      if (mine < all) row = p.parts.rows[mine / items(p, 1)];
      unsigned found = __ballot_sync(0xffffffffu, row.parts > 0);
      if constexpr (kTogether) {
        if (p.options.fixed_splits() == 0 && together(p, found, item)) continue;
      }
      KERNELS_ROLLED
      for (; found != 0; found &= found - 1) {
        const int i = __ffs(int(found)) - 1;
        const Item one(p, item(threadIdx.x / 32, i), from_lane(row, i));
        one.put(p, one.merged(p, 0, one.first.parts));
      }
    }
  }

 private:
  // A lane's four columns of a row.
  struct Item {
    int64_t row, col;
    PartialResults::Row first;
    bool there;

    __device__ __forceinline__ Item(const P& p, int64_t item, const PartialResults::Row& of_first) : first(of_first) {
      const int chunks = int(items(p, 1));
      row = item / chunks, col = item % chunks * kCols + threadIdx.x % 32 * 4;
      there = col < p.shape.value_dim();
    }
    // Merges splits [begin, end).
    __device__ __forceinline__ State merged(const P& p, int begin, int end) const {
      const int64_t v_dim = p.shape.value_dim();
      return merged_states<4, kAtOnce>(end - begin, [&](int64_t part) {
        const int64_t at = row + (begin + part) * first.distance;
        return State(p.parts.rows[at].logsumexp, floats_at<4>(p.parts.outputs + at * v_dim + (there ? col : 0)));
      });
    }
    __device__ __forceinline__ void put(const P& p, State merged) const {
      if (!there) return;
      if constexpr (score_sinks<typename P::S>)
        merged.o = merged.o * merged.SoftmaxState<float>::merge(sink_state(p.score, first.head)).mine;
      if (col == 0) p.options.write_lse(merged.logsumexp(), first.token, first.head, p.shape.heads);
      in_packs(
          lesser(4, p.out_pack), merged.output(), first.head * p.shape.value_dim() + col,
          [&](const auto& some, int64_t at) { put_mapped(sink_end(p.out), sink_map(p.out), some, first.token, at); });
    }
  };

  // found: the warp's items among 32, as bits. Returns whether the block has so few items that all of its warps merged
  // them.
  template <class At>
  static __device__ __forceinline__ bool together(const P& p, unsigned found, const At& item) {
    __shared__ Uninitialized<State, max_threads> states;
    __shared__ unsigned of_warps[kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) of_warps[warp] = found;
    __syncthreads();
    int count = 0;
    KERNELS_UNROLL
    for (int i = 0; i < kWarps; ++i) count += __popc(of_warps[i]);
    if (count <= kMostTogether) {
      KERNELS_ROLLED
      for (int i = 0; i < kWarps; ++i) {
        KERNELS_ROLLED
        for (unsigned left = of_warps[i]; left != 0; left &= left - 1) {
          const int64_t at = item(i, __ffs(int(left)) - 1);
          const Item one(p, at, p.parts.rows[at / items(p, 1)]);
          const int parts = one.first.parts;
          states.items[threadIdx.x] = one.merged(p, parts * warp / kWarps, parts * (warp + 1) / kWarps);
          __syncthreads();
          if (warp == 0)
            one.put(p, merged_states<4, 1>(kWarps, [&](int64_t part) { return states.items[part * 32 + lane]; }));
          __syncthreads();
        }
      }
    }
    __syncthreads();
    return count <= kMostTogether;
  }
};

inline Status too_many_tiles() { return unsupported("there are more than 2^31 tiles of queries"); }

// kShared: whether keys are split so that the work of all sequences together fills the machine.
template <class Body, bool kShared = false, class P>
Status start_prefill(const Exec& ex, const P& problem) {
  const auto grid = PrefillGrid::of<Body>(ex.device(), problem, kShared);
  if (grid.total_items == 0) return too_many_tiles();
  Launch how;
  how.grid.x = unsigned(grid.blocks());
  how.cluster = grid.pair;
  how.threads = Body::max_threads;
  how.shared = Body::shared_bytes(problem.shape);
  how.holds_dependents = grid.reverses;
  typename Body::Params params{problem, grid};
  if constexpr (uses_tma<Body>) params.boxes = boxes_for<Body>(ex, problem, grid.rows_are_queries(problem.shape));
  KERNELS_TRY(launch<Body>(ex, how, params));
  if constexpr (P::kSplits) {
    if (grid.even) return {};
    using Merge = PrefillMerge<P, kShared>;
    const int64_t items =
        Merge::items(problem, PrefillWorkspace(ex.device(), problem.shape, problem.options, kShared).rows);
    if (items == 0) return {};
    Launch merge;
    merge.grid.x = unsigned(
        lesser<int64_t>(Merge::kBlocksOnEach * ex.device().sm_count, (items + Merge::kWarps - 1) / Merge::kWarps));
    merge.threads = Merge::max_threads;
    merge.secondary = true;
    return launch<Merge>(ex, merge, problem);
  }
  return {};
}

template <bool kSplits, class Q, class Kv, class Out, class S>
PrefillProblem<Q, Kv, Out, S, kSplits> prefill_problem(const Q& q, const Kv& kv, const Out& out,
                                                       const AttentionShape& shape, const S& score,
                                                       const Attention& options) {
  const float scale = options.scale_for(shape.dim);
  return {q,
          kv,
          out,
          score,
          shape,
          options,
          scale,
          scale > kSmallScale ? scale * kLog2e : kLog2e,
          max_pack_of(q) >= wide_pack<Q> && heads_in_runs(q, shape.dim),
          key_pack(kv) >= wide_pack<typename KeyRun<Kv>::Codes>,
          value_pack(kv) >= wide_pack<typename ValueRun<Kv>::Codes>,
          lesser(8, max_pack_of(out)),
          {}};
}

inline PartialResults parts_in(const Workspace& workspace, const PrefillWorkspace& room) {
  char* const memory = static_cast<char*>(workspace.ptr) + PrefillWorkspace::kCountBytes;
  return {static_cast<int32_t*>(workspace.ptr), reinterpret_cast<PartialResults::Row*>(memory),
          reinterpret_cast<float*>(memory + room.state_bytes)};
}

// kSplits: whether there is a workspace; its size has been checked.
template <int kLargest, bool kSplits, class Q, class Kv, class Out, class S>
Status prefill(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score,
               const Workspace& workspace, const Attention& options) {
  using P = PrefillProblem<Q, Kv, Out, S, kSplits>;
  P problem = prefill_problem<kSplits>(q, kv, out, shape, score, options);
  if constexpr (kSplits) problem.parts = parts_in(workspace, PrefillWorkspace(ex.device(), shape, options));
  return with_prefill_body<P, kLargest>(
      ex, problem, [&](auto chosen) { return start_prefill<typename decltype(chosen)::Body>(ex, problem); });
}

// The first reason, in order of weight, why a call whose keys and values fit does not take the fastest path.
template <class P>
const char* prefill_why_not(const P& p, bool whole_tiles, bool in_8_bits) {
  using Kv = typename P::Kv;
  if constexpr (narrow_kv<Kv>) {
    using K = typename Coded<typename KeyRun<Kv>::Codes>::Code;
    using V = typename Coded<typename ValueRun<Kv>::Codes>::Code;
    if (!p.wide_queries) return why_not::queries;
    if (p.out_pack < 8) return why_not::results;
    if (!in_8_bits && (!is_16_bit<K> || !is_16_bit<V>)) return why_not::codes;
    if (!whole_tiles) return why_not::filled;
    if (!(p.scale > kSmallScale)) return why_not::scale;
  }
  return "";
}

// Why a call that could take a kernel for sm_90a does not, or "".
template <class Body, class P>
Status why_no_warpgroups(const Exec& ex, const char*& why) {
  why = "";
  if constexpr (narrow_kv<typename P::Kv> && !Body::kWarpgroups && Body::kDim <= kMostHopperDim) {
    if (ex.device().capability != 90) return {};
    why = why_not::mixed;
    if constexpr (has_hopper_prefill<P, Body::kDim>) {
      bool there = false;
      KERNELS_TRY((has_code<HopperBody<P, Body::kDim>>(ex, there)));
      why = there ? why_not::shared : why_not::target;
    }
  }
  return {};
}

template <class Body, class P>
Status describe_prefill(const Exec& ex, const P& problem, AttentionPlan& plan, bool share = false) {
  using Q = typename P::Q;
  using Kv = typename P::Kv;
  const AttentionShape& shape = problem.shape;
  const auto grid = PrefillGrid::of<Body>(ex.device(), problem, share);
  if (grid.total_items == 0) return too_many_tiles();
  constexpr int wide_key = wide_pack<typename KeyRun<Kv>::Codes>,
                wide_value = wide_pack<typename ValueRun<Kv>::Codes>;
  plan.path = narrow_kv<Kv> ? AttentionPath::tensor : AttentionPath::plain;
  plan.warpgroups = Body::kWarpgroups;
  plan.tile_rows = Body::kRows, plan.tile_keys = Body::kKeys;
  plan.tile_dim = Body::kDim > 0 ? Body::kDim : int(shape.dim), plan.tile_v_dim = Body::kCols;
  plan.heads_together = grid.pack.divisor > 1;
  plan.blocks = grid.blocks();
  plan.splits = !P::kSplits ? 1 : share ? problem.options.fixed_splits() : grid.most_splits();
  plan.query_pack = problem.wide_queries ? wide_pack<Q> : 1;
  plan.key_pack = problem.wide_keys ? wide_key : 1;
  plan.value_pack = problem.wide_values ? wide_value : 1;
  plan.result_pack = lesser(Body::kResultPack, problem.out_pack);
  plan.box_rows = plan.result_box_rows = 0;
  if constexpr (uses_tma<Body>) {
    const TileBoxes boxes = boxes_for<Body>(ex, problem, grid.rows_are_queries(problem.shape));
    plan.box_rows = boxes.rows, plan.result_box_rows = boxes.result_rows;
  }
  constexpr bool in_8_bits = std::is_same<Body, HopperBody8<P, 128>>::value;
  plan.why_not = kv_misfit<Kv>(problem.wide_keys, problem.wide_values);
  if (*plan.why_not == '\0') KERNELS_TRY((why_no_warpgroups<Body, P>(ex, plan.why_not)));
  if (*plan.why_not == '\0')
    plan.why_not = prefill_why_not(problem, shape.dim == Body::kDim && shape.value_dim() % Body::kCols == 0, in_8_bits);
  if constexpr (has_latent_prefill<P, Body::kDim> && !Body::kWarpgroups) {
    bool there = false;
    KERNELS_TRY((has_code<LatentPrefillBody<P, Body::kDim>>(ex, there)));
    if (there && *plan.why_not == '\0') plan.why_not = why_not::latents;
  }
  if (uses_tma<Body> && plan.box_rows == 0 && *plan.why_not == '\0') plan.why_not = why_not::boxes;
  return {};
}

template <int kLargest, bool kSplits, class Q, class Kv, class Out, class S>
Status prefill_plan(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                    const S& score, const Attention& options, AttentionPlan& plan) {
  using P = PrefillProblem<Q, Kv, Out, S, kSplits>;
  const P problem = prefill_problem<kSplits>(q, kv, out, shape, score, options);
  return with_prefill_body<P, kLargest>(
      ex, problem, [&](auto chosen) { return describe_prefill<typename decltype(chosen)::Body>(ex, problem, plan); });
}

}  // namespace detail
KERNELS_END
