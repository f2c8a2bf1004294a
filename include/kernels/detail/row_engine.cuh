// The row engine's host side: checks the arguments, chooses pack width and policy, launches one body.
#pragma once

#include "../core/row_call.h"
#include "../core/row_op.h"
#include "../exec.cuh"
#include "../tuning/row.h"
#include "row_bodies.cuh"

KERNELS_BEGIN
namespace detail {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t power_of_two_from(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}
constexpr bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

// Compute values of a row per thread, in units of 4 bytes; narrow packs need more registers for addresses.
constexpr int kTile = 32;
constexpr int kNarrowTile = 16;
constexpr int64_t kMaxGrid = 0x7fffffff;

// The pack widths that are compiled for a pair of functors: the widest that both can use, a 4-byte one in between for
// narrow types, and single elements.
template <class Source, class Sink>
struct PackWidths {
  static constexpr int wide = widest_of<Source>() < widest_of<Sink>() ? widest_of<Source>() : widest_of<Sink>();
  static constexpr int middle = wide == 16 ? 4 : wide == 8 ? 2 : 1;
};

// Elements per thread that a compiled tile holds: whole packs, `elements` values of 4 bytes or half as many doubles.
constexpr int tile_packs(int pack, int elements, int compute_bytes) {
  const int packs = elements * 4 / compute_bytes / pack;
  return packs < 1 ? 1 : packs;
}

template <class Problem>
class RowEngine {
 public:
  using C = typename Problem::C;
  using Widths = PackWidths<typename Problem::Source, typename Problem::Sink>;
  static constexpr int wide = Widths::wide;
  static constexpr int scale = int(sizeof(C)) / 4;
  static constexpr int tile(int pack) { return pack == wide ? kTile : kNarrowTile; }
  // The largest block that keeps rows in registers.
  static int max_block(int pack) {
    return pack == wide ? BlockBody<Problem, wide, packs(wide, kTile), true>::max_threads
           : pack == 1  ? BlockBody<Problem, 1, packs(1, kNarrowTile), true>::max_threads
                        : BlockBody<Problem, Widths::middle, packs(Widths::middle, kNarrowTile), true>::max_threads;
  }
  static constexpr int packs(int pack, int elements) { return tile_packs(pack, elements, int(sizeof(C))); }

  RowEngine(const Exec& ex, const Problem& problem) : ex_(ex), p_(problem) {}

  Status plan(const RowPolicy& asked, RowPlan& plan) const {
    KERNELS_TRY(ex_.status());
    if (asked.max_pack < 0 || asked.max_blocks < 0) return invalid("policy: max_pack or max_blocks is negative");
    if (asked.residency == Residency::automatic &&
        (asked.threads != 0 || asked.cluster != 1 || asked.walk != 0 || asked.rows_per_group != 1)) {
      return invalid("policy: threads, cluster, walk and rows_per_group go with a residency");
    }
    plan.policy = asked;
    plan.pack = choose_pack(asked.max_pack);
    if (asked.residency == Residency::automatic) KERNELS_TRY(choose(plan));
    return complete(plan);
  }

  Status run(const RowPlan& plan) const {
    if (plan.pack == wide) return run_with<wide, true, true>(plan);
    if (plan.pack == 1) return run_with<1, true, false>(plan);
    return run_with<Widths::middle, false, false>(plan);
  }

 private:
  int choose_pack(int limit) const {
    int n = lesser(wide, lesser(max_pack_of(p_.source), max_pack_of(p_.sink)));
    if (limit > 0) n = lesser(n, limit);
    for (const int width : {wide, Widths::middle}) {
      if (n >= width && p_.cols % width == 0) return width;
    }
    return 1;
  }

  // Groups are compiled for wide and for single packs; in between a block of one warp does the same.
  bool has_groups(int pack) const { return pack == wide || pack == 1; }

  Status has_clusters(bool& yes) const {
    yes = false;
    if (ex_.device().capability < 90) return {};
    int compiled_for = 0;
    KERNELS_TRY((image_architecture<BlockBody<Problem, wide, packs(wide, kTile), true>>(compiled_for)));
    yes = compiled_for >= 90;
    return {};
  }

  // The automatic choice.
  Status choose(RowPlan& plan) const {
    RowPolicy& policy = plan.policy;
    const int64_t cols = p_.cols * scale;
    bool clusters = false;
    if (cols > 1024) KERNELS_TRY(has_clusters(clusters));

    // Few rows: as many blocks for each as keep the multiprocessors busy, but every block with enough to do.
    if (p_.rows < ex_.device().sm_count && cols >= 2 * tuning::kFewRowsElements) {
      if (clusters) return choose_cluster(plan);
      if (!Problem::row_sink && ex_.workspace().bytes >= size_t(p_.rows) * tuning::kMaxChunks * sizeof(typename Problem::Op::State)) {
        policy.residency = Residency::split;
        return {};
      }
    }

    // The table speaks of wide packs; with others a thread holds less of a row.
    const int64_t needed = cols * kTile / tile(plan.pack);
    for (const tuning::RowTuning& row : tuning::kRows) {
      if (needed <= row.max_cols && (clusters || row.cluster == 1)) return take(plan, row);
    }
    if (clusters) policy.cluster = kPortableCluster;
    policy.residency = shared_or_streamed(plan.pack, policy.cluster);
    if (policy.residency == Residency::streamed && width_of(policy.cluster) * scale <= int64_t(max_block(plan.pack)) * tile(plan.pack)) {
      policy.residency = Residency::registers;
    }
    return {};
  }

  Status choose_cluster(RowPlan& plan) const {
    RowPolicy& policy = plan.policy;
    const int64_t cols = p_.cols * scale;
    const int64_t wanted = lesser<int64_t>(ceil_div(2 * ex_.device().sm_count, p_.rows), cols / tuning::kFewRowsElements);
    const int64_t in_registers = int64_t(max_block(plan.pack)) * tile(plan.pack);
    const int most = fits_largest_cluster() ? kMaxCluster : kPortableCluster;
    while (policy.cluster < most && (2 * policy.cluster <= wanted || width_of(policy.cluster) * scale > in_registers)) policy.cluster *= 2;
    const int64_t width = width_of(policy.cluster) * scale;
    if (width > in_registers) {
      policy.residency = shared_or_streamed(plan.pack, policy.cluster);
      return {};
    }
    policy.residency = Residency::registers;
    policy.threads = int(lesser<int64_t>(max_block(plan.pack), round_up(ceil_div(width, lesser(tuning::kFewRowsPerThread, tile(plan.pack))), 32)));
    policy.walk = 1;
    return {};
  }

  // Clusters of 16 are an option of the hardware.
  bool fits_largest_cluster() const {
    Launch how;
    how.threads = 256;
    how.cluster = kMaxCluster;
    how.grid.x = kMaxCluster;
    int64_t clusters = 0;
    return resident_clusters<BlockBody<Problem, wide, packs(wide, kTile), true>>(ex_, how, clusters).ok() && clusters > 0;
  }

  Residency shared_or_streamed(int pack, int cluster) const {
    const size_t bytes = kept_bytes(width_of(cluster)) + sizeof(Scratch<Problem>);
    return pack == wide && bytes <= size_t(ex_.device().shared_per_block) ? Residency::shared : Residency::streamed;
  }

  // What a block keeps of `width` columns in shared memory.
  static size_t kept_bytes(int64_t width) {
    return size_t(width) / wide * sizeof(typename StagedBody<Problem, wide, packs(wide, kTile), true>::Kept);
  }

  Status take(RowPlan& plan, const tuning::RowTuning& row) const {
    RowPolicy& policy = plan.policy;
    policy.residency = row.residency;
    policy.cluster = row.cluster;
    policy.rows_per_group = row.rows_per_group;
    policy.walk = Problem::Op::long_walks ? row.long_walk : row.walk;
    const int elements = lesser(row.elements, tile(plan.pack));
    if (row.residency == Residency::group && has_groups(plan.pack)) {
      policy.threads = int(lesser<int64_t>(32, power_of_two_from(ceil_div(p_.cols, lesser<int64_t>(plan.pack * 32, elements / scale)))));
      return {};
    }
    policy.residency = Residency::registers;
    policy.rows_per_group = 1;
    // Functors that need more registers leave room for fewer threads: then more blocks share the row.
    const auto threads = [&] { return round_up(ceil_div(width_of(policy.cluster) * scale, elements), 32); };
    if (threads() > max_block(plan.pack)) {
      bool clusters = false;
      KERNELS_TRY(has_clusters(clusters));
      while (clusters && policy.cluster < kPortableCluster && threads() > max_block(plan.pack)) policy.cluster *= 2;
    }
    if (threads() > max_block(plan.pack)) {
      policy.walk = 0;
      policy.residency = shared_or_streamed(plan.pack, policy.cluster);
    } else {
      policy.threads = int(threads());
    }
    return {};
  }

  int64_t width_of(int cluster) const { return round_up(ceil_div(p_.cols, cluster), kWidestPack); }

  // Fills in what is open and refuses what cannot be.
  Status complete(RowPlan& plan) const {
    RowPolicy& policy = plan.policy;
    const int64_t cols = p_.cols;
    const int64_t elements = tile(plan.pack) / scale;
    if (policy.cluster < 1 || policy.cluster > kMaxCluster || !is_power_of_two(policy.cluster)) {
      return invalid("policy: cluster is not 1, 2, 4, 8 or 16");
    }
    if (policy.rows_per_group != 1 && policy.rows_per_group != 2) return invalid("policy: rows_per_group is not 1 or 2");
    if (policy.cluster > 1) {
      if (policy.residency == Residency::group || policy.residency == Residency::split) {
        return invalid("policy: a cluster goes with registers, shared or streamed only");
      }
      bool clusters = false;
      KERNELS_TRY(has_clusters(clusters));
      if (!clusters) return unsupported("policy: clusters need an sm_90 GPU and code compiled for it");
    }
    if (policy.rows_per_group == 2 && policy.residency != Residency::group) {
      return invalid("policy: two rows at a time go with groups only");
    }
    plan.width = int(policy.cluster > 1 ? width_of(policy.cluster) : round_up(cols, plan.pack));

    if (policy.walk < 0) return invalid("policy: walk is negative");
    if (policy.walk > 0 && policy.residency != Residency::group && policy.residency != Residency::registers) {
      return invalid("policy: walk goes with groups and registers only");
    }
    if (policy.residency == Residency::group) {
      if (!has_groups(plan.pack)) return unsupported("policy: groups are compiled for the widest and for single packs");
      const int most = plan.pack * packs(plan.pack, policy.rows_per_group == 2 ? 8 : tile(plan.pack));
      if (policy.threads == 0) policy.threads = int(lesser<int64_t>(32, power_of_two_from(ceil_div(cols, plan.pack))));
      if (policy.threads > 32 || !is_power_of_two(policy.threads)) {
        return invalid("policy: threads of a group is not a power of two up to 32");
      }
      if (cols > int64_t(most) * policy.threads) return unsupported("policy: the row does not fit the registers of the group");
      if (policy.rows_per_group == 2 && plan.pack != wide) return unsupported("policy: two rows at a time need the widest packs");
      fit_walk(plan, ceil_div(p_.rows, int64_t(tuning::kGroupBlock / policy.threads) * policy.rows_per_group));
      return {};
    }

    if (policy.threads == 0) {
      policy.threads = policy.residency == Residency::registers
                           ? int(lesser<int64_t>(max_block(plan.pack), round_up(ceil_div(plan.width, elements), 32)))
                           : plan.width > tuning::kStreamLong ? tuning::kStreamThreadsLong : tuning::kStreamThreads;
    }
    const int most = policy.residency == Residency::registers ? max_block(plan.pack) : policy.residency == Residency::split ? 512 : 256;
    if (policy.threads < 32 || policy.threads > most || policy.threads % 32 != 0) {
      return invalid("policy: threads of a block is not a multiple of 32 up to 1024 in registers (768 or 512 for functors that need more of them), 512 split, 256 otherwise");
    }
    if (policy.residency == Residency::registers) {
      if (ceil_div(plan.width, plan.pack) > int64_t(policy.threads) * packs(plan.pack, tile(plan.pack))) {
        return unsupported("policy: the row does not fit the registers of the block or cluster");
      }
    }
    if (policy.residency == Residency::shared && shared_or_streamed(plan.pack, policy.cluster) != Residency::shared) {
      return unsupported("policy: shared memory needs the widest packs and a row that fits the block or cluster");
    }
    if (policy.residency == Residency::registers) fit_walk(plan, p_.rows);
    if (policy.residency == Residency::split) return complete_split(plan);
    return {};
  }

  // Blocks stay for as many passes as asked, or more where the grid would be too large otherwise.
  void fit_walk(RowPlan& plan, int64_t passes) const {
    const int64_t most = blocks(plan, kMaxGrid) / plan.policy.cluster;
    plan.walk = greater<int64_t>(greater(plan.policy.walk, 1), ceil_div(passes, most));
  }

  Status complete_split(RowPlan& plan) const {
    if (Problem::row_sink) return unsupported("policy: a split row cannot be quantized with a scale per row");
    if (plan.pack != wide && plan.pack != 1) plan.pack = 1;
    const int64_t blocks_wanted = ceil_div(4 * ex_.device().sm_count, p_.rows);
    const int64_t chunks = lesser<int64_t>(tuning::kMaxChunks, greater<int64_t>(1, lesser<int64_t>(blocks_wanted, p_.cols * scale / tuning::kFewRowsElements)));
    plan.width = int(round_up(ceil_div(p_.cols, chunks), kWidestPack));
    plan.chunks = int(ceil_div(p_.cols, plan.width));
    if (ex_.workspace().ptr == nullptr || ex_.workspace().bytes < size_t(p_.rows) * plan.chunks * sizeof(typename Problem::Op::State)) {
      return invalid("policy: a split row needs a workspace of row_workspace_bytes()");
    }
    return {};
  }

  int64_t blocks(const RowPlan& plan, int64_t wanted) const {
    const int64_t cluster = plan.policy.cluster;
    int64_t limit = kMaxGrid / cluster * cluster;
    if (plan.policy.max_blocks > 0) limit = lesser(limit, round_up(plan.policy.max_blocks, cluster));
    return lesser(limit, wanted);
  }

  template <int N, bool kGroups, bool kTwoRows>
  Status run_with(const RowPlan& plan) const {
    const RowPolicy& policy = plan.policy;
    constexpr int K = packs(N, tile(N));
    Launch how;
    how.threads = policy.threads;
    how.cluster = policy.cluster;
    how.grid.x = unsigned(blocks(plan, p_.rows * policy.cluster));
    switch (policy.residency) {
      case Residency::registers:
        {
          const Walk walk = Walk::over(p_.rows, plan.walk, plan.walk > policy.walk || p_.rows < ex_.device().sm_count);
          how.grid.x = unsigned(walk.blocks(p_.rows) * policy.cluster);
          const bool even = plan.width == policy.threads * N * K && int64_t(plan.width) * policy.cluster == p_.cols;
          const Count<C> block_columns(plan.width);
          if constexpr (N == wide) {
            if (policy.threads <= 256) return launch<BlockBody<Problem, N, K, false>>(ex_, how, {p_, walk, plan.width, even, block_columns});
          }
          return launch<BlockBody<Problem, N, K, true>>(ex_, how, {p_, walk, plan.width, even, block_columns});
        }
      case Residency::shared:
        how.shared = kept_bytes(plan.width);
        if constexpr (N == wide) return launch<StagedBody<Problem, N, K, true>>(ex_, how, {p_, plan.width});
        break;
      case Residency::streamed:
        return launch<StagedBody<Problem, N, K, false>>(ex_, how, {p_, plan.width});
      case Residency::group:
        if constexpr (kGroups) return run_groups<N, kTwoRows>(plan);
        break;
      case Residency::split:
        if constexpr (kGroups && !Problem::row_sink) {
          how.grid.x = unsigned(blocks(plan, p_.rows * plan.chunks));
          const SplitParams<Problem> params{p_, static_cast<typename Problem::Op::State*>(ex_.workspace().ptr), plan.chunks, plan.width};
          KERNELS_TRY((launch<PartialBody<Problem, N, K>>(ex_, how, params)));
          return launch<FinishBody<Problem, N, K>>(ex_, how, params);
        }
        break;
      case Residency::automatic: break;
    }
    return unsupported("policy: no kernel is compiled for this combination");
  }

  template <int N, bool kTwoRows>
  Status run_groups(const RowPlan& plan) const {
    const int lanes = plan.policy.threads;
    const int64_t held = ceil_div(ceil_div(p_.cols, N), lanes);  // packs per lane
    const int rows = plan.policy.rows_per_group;
    Launch how;
    how.threads = tuning::kGroupBlock;
    const int64_t passes = ceil_div(p_.rows, int64_t(how.threads / lanes) * rows);
    const Walk walk = Walk::over(passes, plan.walk, plan.walk > plan.policy.walk);
    how.grid.x = unsigned(walk.blocks(passes));
    constexpr int small = packs(N, 8), large = packs(N, tile(N));
    if constexpr (kTwoRows) {
      if (rows == 2) return launch<GroupBody<Problem, N, small, 2>>(ex_, how, {p_, walk, lanes});
      if (held <= small) return launch<GroupBody<Problem, N, small, 1>>(ex_, how, {p_, walk, lanes});
    }
    return launch<GroupBody<Problem, N, large, 1>>(ex_, how, {p_, walk, lanes});
  }

  const Exec& ex_;
  const Problem& p_;
};

template <class Options, class Source, class Sink>
Status plan_rows(const Exec& ex, const Options& options, const Source& source, const Sink& sink, int64_t rows,
                 int64_t cols, const RowPolicy& policy, RowPlan& plan, bool start) {
  bool empty = false;
  KERNELS_TRY(check_rows(options, source, sink, rows, cols, empty));
  if (empty) return {};
  using C = compute_type<Source>;
  using Op = decltype(options.template op<C>());
  using Problem = RowProblem<Op, Source, Sink>;
  const Problem problem{options.template op<C>(), source, sink, rows, cols, Count<C>(int(cols))};
  const RowEngine<Problem> engine(ex, problem);
  KERNELS_TRY(engine.plan(policy, plan));
  return start ? engine.run(plan) : Status{};
}

template <class Options, class Source, class Sink>
Status run_rows(const Exec& ex, const Options& options, const Source& source, const Sink& sink, int64_t rows,
                int64_t cols, const RowPolicy& policy) {
  RowPlan plan;
  return plan_rows(ex, options, source, sink, rows, cols, policy, plan, true);
}

}  // namespace detail

// How softmax, layernorm ... would run: k::row_plan(ex, k::Softmax{}, in, out, rows, cols, policy, plan).
template <class Options, class Source, class Sink>
Status row_plan(const Exec& ex, const Options& options, const Source& source, const Sink& sink, int64_t rows,
                int64_t cols, const RowPolicy& policy, RowPlan& plan) {
  return detail::plan_rows(ex, options, source, sink, rows, cols, policy, plan, false);
}

// Workspace with which few, long rows can be split over the whole GPU where there are no clusters (before sm_90).
inline size_t row_workspace_bytes(int64_t rows) { return size_t(rows > 0 ? rows : 0) * tuning::kMaxChunks * 4 * sizeof(double); }

KERNELS_END
