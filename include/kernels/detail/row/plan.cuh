// Makes the plan of a row engine call: pack width, residency, threads and cluster, from the caller's policy or from the
// table in tuning/row.h.
#pragma once

#include "../../core/arguments.h"
#include "../../core/row_call.h"
#include "../../core/row_op.h"
#include "../../exec.cuh"
#include "../../tuning/row.h"
#include "bodies.cuh"

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
constexpr int within(int low, int n, int high) { return n < low ? low : n > high ? high : n; }

// The pack widths that are compiled for a pair of functors: the widest that both can use, single elements, and for
// narrow types and functors with a max_pack() a 4-byte width in between. `ends`: whether the widest also serves rows
// that do not begin and end at multiples of it, as both functors take packs at any column.
template <class Source, class Sink>
struct PackWidths {
  static constexpr int wide = widest_of<Source>() < widest_of<Sink>() ? widest_of<Source>() : widest_of<Sink>();
  static constexpr bool ends = wide > 1 && takes_any_column<Source>() && takes_any_column<Sink>();
  static constexpr bool halves = wide == 4 && (says_pack<Source> || says_pack<SinkEnd<Sink>>);
  static constexpr int middle = wide == 16 ? 4 : wide == 8 || halves ? 2 : 1;
};

// The same problem for rows that begin at any element, if functors allow it.
template <class P, bool kEnds>
struct WithEnds {
  using type = P;
};
template <class P>
struct WithEnds<P, true> {
  using type = RowProblem<typename P::Op, std::decay_t<decltype(leading(std::declval<const typename P::Source&>()))>,
                          std::decay_t<decltype(any_column(std::declval<const typename P::Sink&>()))>>;
};

// Makes plans. It only uses the sizes of the bodies, but these determine what is compiled.
template <class Problem>
class RowPlanner {
 public:
  using C = typename Problem::C;
  using Widths = PackWidths<typename Problem::Source, typename Problem::Sink>;
  static constexpr int wide = Widths::wide;
  static constexpr bool ends = Widths::ends;
  static constexpr int middle = ends ? 1 : Widths::middle;  // rows with ends need no width in between
  using EndsProblem = typename WithEnds<Problem, ends>::type;
  static constexpr int scale = int(sizeof(C)) / 4;

  // Packs that a thread processes at a time: four of 16 bytes, but at most 32 compute values of 4 bytes; 8 values if
  // packs are narrow. Below, the packs that a lane of a group holds.
  static constexpr int packs(int pack) {
    return pack == wide ? within(1, 32 / (pack * scale), 4) : within(1, 8 / (pack * scale), 8);
  }
  static constexpr int group_packs(int pack) {
    return pack == wide ? within(1, packs(pack) / 2, 2) : within(1, 16 / (pack * scale), 16);
  }
  // The same with more loads in flight: what the threads hold must still fit.
  static constexpr bool deep = packs(wide) * sizeof(Fetched<typename Problem::Source, wide>) <= 64 &&
                               (!Problem::Op::takes_two_passes || 2 * packs(wide) * wide * scale <= 32);
  static constexpr int kDeep = deep ? 2 * packs(wide) : packs(wide);
  // With ends: packs of at most 8 elements, as each remaining element needs a lane of its warp; the number of packs as
  // above.
  static constexpr int ends_pack = wide < 8 ? wide : 8, ends_packs = within(1, 32 / (ends_pack * scale), 4),
                       ends_lanes = 4 * ends_pack;
  static_assert(ends_lanes <= 32, "a warp takes what is left of a row");
  using EndsGroup = GroupBody<EndsProblem, ends_pack, ends_packs, false, ends>;
  using EndsStream = StreamBody<EndsProblem, ends_pack, ends_packs, ends>;
  static int packs_of(const RowPlan& plan) { return plan.ends ? ends_packs : packs(plan.pack); }
  // Whether a group of `lanes` lanes holds such rows.
  static bool ends_fit(int64_t cols, int lanes) {
    return lanes >= ends_lanes && RowEnds::most_packs(cols, ends_pack) <= int64_t(lanes) * ends_packs;
  }

  // The largest block.
  static int max_block(int pack, Residency residency, bool with_ends = false) {
    if (with_ends) return EndsStream::max_threads;
    const auto largest = [&](auto n) {
      constexpr int N = decltype(n)::value;
      return residency == Residency::registers ? BlockBody<Problem, N, packs(N)>::max_threads
                                               : StreamBody<Problem, N, packs(N)>::max_threads;
    };
    if (residency == Residency::split) return PartialBody<Problem, wide, packs(wide)>::max_threads;
    return pack == wide ? largest(std::integral_constant<int, wide>())
           : pack == 1  ? largest(std::integral_constant<int, 1>())
                        : largest(std::integral_constant<int, middle>());
  }

  RowPlanner(const Exec& ex, const Problem& problem) : ex_(ex), p_(problem) {}

  Status plan(const RowPolicy& asked, RowPlan& plan) const {
    KERNELS_TRY(ex_.status());
    if (asked.max_pack < 0 || asked.max_blocks < 0) return invalid("policy: max_pack or max_blocks is negative");
    if (asked.residency == Residency::automatic &&
        (asked.threads != 0 || asked.cluster != 1)) {
      return invalid("policy: threads and cluster go with a residency");
    }
    if (asked.batch_invariant && asked.residency == Residency::split)
      return invalid("policy: how rows are split depends on how many there are, which batch_invariant rules out");
    plan = RowPlan{};
    plan.policy = asked;
    choose_pack(plan);
    if (asked.residency == Residency::automatic) KERNELS_TRY(choose(plan));
    return complete(plan);
  }

 protected:
  // A body as a kernel.
  template <class Body>
  using Started = std::conditional_t<changes_itself<typename Problem::Source> || changes_itself<typename Problem::Sink>,
                                     OnOwnCopy<Body>, Body>;

  // The phase of the functor that determines where rows are split: the source, if it can lead, otherwise the sink.
  RowPhase phase() const {
    const Plane in = plane_of(p_.source, p_.rows, p_.cols), out = plane_of(p_.sink, p_.rows, p_.cols);
    return leads<typename Problem::Source>() ? phase_of(in) : known(out) ? phase_of(out) : RowPhase{};
  }

  // The shared memory of one step of a block.
  int64_t kept_bytes(const RowPlan& plan) const {
    return int64_t(plan.policy.threads) * packs(plan.pack) * int64_t(fetched_bytes(plan.pack));
  }
  const Exec& ex_;
  const Problem& p_;

 private:
  void choose_pack(RowPlan& plan) const {
    const RowPolicy& asked = plan.policy;
    int n = lesser(wide, lesser(max_pack_of(p_.source, p_.cols), max_pack_of(p_.sink, p_.cols)));
    if (asked.max_pack > 0) n = lesser(n, asked.max_pack);
    const auto fits = [&](int width) { return n >= width && p_.cols % width == 0; };
    plan.pack = fits(wide) ? wide : fits(middle) ? middle : 1;
    if (wide == 1) plan.why_not = why_not::narrow;
    if (plan.pack == wide) return;
    plan.why_not = asked.max_pack > 0 && asked.max_pack < wide ? why_not::limited : why_not_ends(plan);
    if (*plan.why_not != 0 && plan.why_not != why_not::pieces) return;
    plan.pack = ends_pack;
    plan.ends = true;
  }

  // Why rows that begin anywhere are not moved in wide packs; "" or why_not::pieces if they are.
  const char* why_not_ends(const RowPlan& plan) const {
    if constexpr (!ends) {
      return why_not::unknown;
    } else {
      const RowPolicy& asked = plan.policy;
      const bool automatic = asked.residency == Residency::automatic, group = asked.residency == Residency::group;
      if (!automatic && !group && asked.residency != Residency::streamed) return why_not::whole_only;
      if (group && asked.threads != 0 && asked.threads < ends_lanes) return why_not::whole_only;
      if (automatic && p_.cols < tuning::kEndsPacks * ends_pack) return why_not::short_rows;
      const Plane out = plane_of(p_.sink, p_.rows, p_.cols);
      if (leads<typename Problem::Source>() && !known(plane_of(p_.source, p_.rows, p_.cols))) return why_not::unknown;
      if (asked.batch_invariant && phase().step % uint32_t(ends_pack) != 0) return why_not::by_place;
      if (!leads<typename Problem::Source>() || !known(out)) return "";
      // The width of the pieces that the sink can write where the source's packs begin.
      const RowPhase in = phase(), other = phase_of(out);
      uint32_t piece = ends_pack;
      while ((in.first - other.first) % piece != 0 || (in.step - other.step) % piece != 0) piece /= 2;
      return piece == ends_pack ? "" : piece * out.element < 4 ? why_not::apart : why_not::pieces;
    }
  }
  static bool known(const Plane& plane) { return plane.rows > 0 && plane.element > 0; }
  static RowPhase phase_of(const Plane& plane) {
    return {uint32_t(reinterpret_cast<uintptr_t>(plane.begin) / unsigned(plane.element)),
            uint32_t(plane.stride / plane.element)};
  }

  // Groups are compiled for wide and single packs; for the width in between a block of one warp does the same.
  bool has_groups(int pack) const { return pack == wide || pack == 1; }

  // Whether the code that runs is for GPUs with clusters; it has no kernels for split rows then.
  Status has_clusters(bool& yes) const {
    int compiled_for = 0;
    KERNELS_TRY((image_architecture<Started<BlockBody<Problem, wide, packs(wide)>>>(ex_, compiled_for)));
    yes = compiled_for >= 90;
    return {};
  }

  // The automatic choice.
  Status choose(RowPlan& plan) const {
    KERNELS_TRY(choose_fastest(plan));
    if (loaded_once<typename Problem::Source> && !keeps_all(plan)) choose_keeping(plan);
    return {};
  }

  // Whether no element is read a second time.
  bool keeps_all(RowPlan plan) const {
    if (!complete(plan)) return false;
    const Residency residency = plan.policy.residency;
    return residency == Residency::group || residency == Residency::registers ||
           (residency == Residency::shared && plan.kept == steps_of(plan));
  }

  // Registers, or the shared memory of as many blocks as the row needs; if no cluster is large enough, the plan stays
  // as it is.
  void choose_keeping(RowPlan& plan) const {
    bool clusters = false;
    const bool known = has_clusters(clusters).ok();
    for (const Residency residency : {Residency::registers, Residency::shared}) {
      for (int cluster = 1; cluster <= (known && clusters ? kPortableCluster : 1); cluster *= 2) {
        for (const int threads : {0, 256, 64}) {
          RowPlan trial = plan;
          trial.policy.residency = residency;
          trial.policy.threads = threads;
          trial.policy.cluster = cluster;
          if (!keeps_all(trial)) continue;
          plan = trial;
          return;
        }
        if (residency == Residency::registers) break;
      }
    }
  }

  Status choose_fastest(RowPlan& plan) const {
    RowPolicy& policy = plan.policy;
    bool clusters = false;
    if (p_.cols > 1024) KERNELS_TRY(has_clusters(clusters));

    // Few rows: as many blocks for each as keep the multiprocessors busy, but each with enough to do. The choice below
    // does not depend on the number of rows.
    const bool few = p_.rows <= ex_.device().sm_count && !policy.batch_invariant;
    if (few && p_.cols * scale > 2 * tuning::kFewRowsElements) {
      if (clusters) return choose_cluster(plan);
      if (!Problem::row_sink && ex_.workspace().ptr != nullptr && check_parts(tuning::kMaxChunks).ok()) {
        policy.residency = Residency::split;
        if (plan.ends) plan.ends = false, plan.pack = 1, plan.why_not = why_not::whole_only;
        return {};
      }
    }

    // The table assumes wide packs; of other packs a thread takes as many as make the same work.
    const int64_t tile = plan.ends           ? ends_pack * ends_packs
                         : plan.pack == wide ? int64_t(wide) * packs(wide)
                                             : 16 / scale;
    const int64_t units = ceil_div(plan.ends ? in_packs() : p_.cols, tile) * packs(wide);
    for (const tuning::RowTuning& row : tuning::kRows) {
      if (units <= row.max_packs && (clusters || row.cluster == 1)) return take(plan, row, units);
    }
    return {};
  }

  Status take(RowPlan& plan, const tuning::RowTuning& row, int64_t units) const {
    RowPolicy& policy = plan.policy;
    policy.residency = row.residency;
    policy.cluster = row.cluster;
    if (plan.ends) {
      policy.residency = in_packs() <= int64_t(tuning::kEndsHeld) * 32 * ends_pack && ends_fit(p_.cols, 32)
                             ? Residency::group
                             : Residency::streamed;
      if (policy.residency == Residency::group) return {};
    }
    if (policy.residency == Residency::group) {
      if (has_groups(plan.pack) && p_.cols <= int64_t(32) * plan.pack * group_packs(plan.pack)) {
        return {};
      }
      policy.residency = Residency::registers;
    }
    const int most = max_block(plan.pack, policy.residency, plan.ends);
    const int64_t each = Problem::Op::takes_two_passes            ? row.packs
                         : plan.ends && units > tuning::kEndsWarp ? greater(row.packs_once, tuning::kEndsOnce)
                                                                  : row.packs_once;
    policy.threads = int(lesser<int64_t>(round_up(ceil_div(units, each * policy.cluster), 32), most));
    // Then two blocks share a multiprocessor, and one reads while the threads of the other synchronize. But if the sink
    // reads more than one vector for every row, both rows would be evicted from the first-level cache.
    if (plan.ends && policy.threads > 512 && sizeof(Operands<EndsProblem, ends_pack>) <= 16)
      policy.threads = int(round_up(ceil_div(policy.threads, 2), 32));
    if (policy.residency == Residency::registers && !choose_registers(plan)) policy.residency = Residency::streamed;
    return can_keep(plan);
  }

  // Rows that do not fit into shared memory at all are read again.
  Status can_keep(RowPlan& plan) const {
    RowPlan trial = plan;
    if (plan.policy.residency == Residency::shared && !complete(trial)) plan.policy.residency = Residency::streamed;
    return {};
  }

  // One warp; or a block in which every thread holds the same number of packs: the largest that fits, but at least half
  // of the maximum.
  bool choose_registers(RowPlan& plan) const {
    const int64_t warp_packs = int64_t(32) * plan.pack;
    if (plan.pack != wide) return false;
    if (p_.cols <= warp_packs * packs(wide)) {
      plan.policy.threads = 32;
      return true;
    }
    if (p_.cols % warp_packs != 0) return false;
    for (int count = packs(wide); count >= packs(wide) / 2 && count > 0; --count) {
      const int64_t threads = 32 * (p_.cols / warp_packs / count);
      if (p_.cols / warp_packs % count != 0 || threads > max_block(wide, Residency::registers)) continue;
      plan.policy.threads = int(threads);
      return true;
    }
    return false;
  }

  Status choose_cluster(RowPlan& plan) const {
    RowPolicy& policy = plan.policy;
    const int64_t wanted =
        lesser<int64_t>(ceil_div(2 * ex_.device().sm_count, p_.rows), p_.cols * scale / tuning::kFewRowsElements);
    const int most = fits_largest_cluster() ? kMaxCluster : kPortableCluster;
    while (policy.cluster < most && 2 * policy.cluster <= wanted) policy.cluster *= 2;
    // In registers, if there is room for all threads at once. Otherwise half as many threads, in blocks as large as
    // possible, process the row in steps.
    const int64_t packs_each = ceil_div(width_of(policy.cluster), int64_t(plan.pack));
    const int64_t threads = round_up(ceil_div(packs_each, int64_t(packs_of(plan))), 32);
    const int64_t room = int64_t(tuning::kFewRowsThreads) * ex_.device().sm_count / (p_.rows * policy.cluster);
    const bool held = !plan.ends && threads <= lesser<int64_t>(room, max_block(plan.pack, Residency::registers));
    policy.residency = held ? Residency::registers : plan.ends ? Residency::streamed : Residency::shared;
    policy.threads = int(threads);
    if (held) return {};
    const int largest = max_block(plan.pack, policy.residency, plan.ends);
    policy.threads = int(lesser<int64_t>(largest, round_up(ceil_div(threads, 2), 32)));
    // Nearly as many blocks as multiprocessors are enough.
    const auto enough_blocks = [&](int cluster) { return p_.rows * cluster >= ex_.device().sm_count * 7 / 8; };
    for (; enough_blocks(policy.cluster / 2) && 2 * policy.threads <= largest; policy.cluster /= 2) policy.threads *= 2;
    return can_keep(plan);
  }

  // Clusters of 16 are non-portable: not every device supports them.
  bool fits_largest_cluster() const {
    Launch how;
    how.threads = 1024;
    how.cluster = kMaxCluster;
    how.grid.x = kMaxCluster;
    int64_t clusters = 0;
    return resident_clusters<Started<BlockBody<Problem, wide, packs(wide)>>>(ex_, how, clusters).ok() && clusters > 0;
  }

  int64_t width_of(int cluster) const {
    return round_up(ceil_div(p_.cols, cluster),
                    Problem::quantizes_groups ? 32 * wide : kWidestPack);  // warps hold whole groups
  }
  // If groups are quantized, a row has whole warps.
  static constexpr int least_lanes = Problem::quantizes_groups ? 32 : 1;

  // Fills in open fields, and refuses what is not possible.
  Status complete(RowPlan& plan) const {
    RowPolicy& policy = plan.policy;
    const Residency residency = policy.residency;
    if (policy.cluster < 1 || policy.cluster > kMaxCluster || !is_power_of_two(policy.cluster)) {
      return invalid("policy: cluster is not 1, 2, 4, 8 or 16");
    }
    if (policy.cluster > 1) {
      if (residency == Residency::group || residency == Residency::split) {
        return invalid("policy: a cluster goes with registers, shared or streamed only");
      }
      bool clusters = false;
      KERNELS_TRY(has_clusters(clusters));
      if (!clusters) return unsupported("policy: clusters need an sm_90 GPU and code compiled for it");
    }
    if (residency == Residency::group) return complete_group(plan);

    plan.width = int(policy.cluster > 1 ? width_of(policy.cluster)
                     : plan.ends        ? in_packs()
                                        : round_up(p_.cols, plan.pack));
    const bool held = residency == Residency::registers;
    const int64_t tiles = ceil_div(plan.width, int64_t(plan.pack) * packs_of(plan));  // that one thread takes at a time
    const int most = max_block(plan.pack, residency, plan.ends);
    if (policy.threads == 0) {
      const int64_t wanted = held ? tiles : ceil_div(tiles, 2);
      policy.threads = int(lesser<int64_t>(most, greater<int64_t>(32, round_up(wanted, 32))));
    }
    if (policy.threads < 32 || policy.threads > most || policy.threads % 32 != 0) {
      return invalid(
          "policy: threads of a block is not a multiple of 32 up to 1024 (768 or 512 for functors that need many registers, 512 split)");
    }
    if (residency == Residency::split) return complete_split(plan);
    const int64_t warps = policy.threads / 32;
    plan.warp_width = int(ceil_div(ceil_div(plan.width, int64_t(32) * plan.pack), warps) * 32 * plan.pack);
    if (held) {
      const int count = plan.warp_width / (32 * plan.pack), most = packs(plan.pack);
      if (count > most) return unsupported("policy: the row does not fit the registers of the block or cluster");
      // Blocks as wide as their threads can hold, except the last: then all threads of a block have the same number.
      plan.width = int(warps * plan.warp_width);
      plan.count = count;
    }
    if (residency == Residency::shared) {
      plan.kept = kept_of(plan);
      if (plan.kept <= 0) return unsupported("policy: shared memory has no room for what the functors read");
    }
    return {};
  }

  Status complete_group(RowPlan& plan) const {
    RowPolicy& policy = plan.policy;
    if (plan.ends) {
      if (policy.threads == 0) policy.threads = lanes_with_ends();
      if (policy.threads > 32 || !is_power_of_two(policy.threads)) {
        return invalid("policy: threads of a group is not a power of two up to 32");
      }
      if (!ends_fit(p_.cols, policy.threads))
        return unsupported("policy: the row does not fit the registers of the group");
      return {};
    }
    if (!has_groups(plan.pack)) return unsupported("policy: groups are compiled for the widest and for single packs");
    const int64_t tile = int64_t(plan.pack) * group_packs(plan.pack);
    if (policy.threads == 0)
      policy.threads =
          int(lesser<int64_t>(32, greater<int64_t>(least_lanes, power_of_two_from(ceil_div(p_.cols, tile)))));
    if (policy.threads < least_lanes)
      return unsupported("policy: rows whose groups are quantized need groups of 32 threads");
    if (policy.threads > 32 || !is_power_of_two(policy.threads)) {
      return invalid("policy: threads of a group is not a power of two up to 32");
    }
    if (p_.cols > tile * policy.threads) return unsupported("policy: the row does not fit the registers of the group");
    plan.count = p_.cols == tile * policy.threads && policy.threads > 1 ? group_packs(plan.pack) : 0;
    return {};
  }

  // Lanes that each hold half of their maximum, or all lanes.
  int lanes_with_ends() const {
    const int64_t wanted = power_of_two_from(ceil_div(in_packs(), int64_t(ends_pack) * within(1, ends_packs / 2, 2)));
    return int(lesser<int64_t>(32, greater<int64_t>(ends_lanes, wanted)));
  }
  // An upper bound on the columns in a row's packs; at least one pack.
  int64_t in_packs() const { return greater<int64_t>(1, RowEnds::most_packs(p_.cols, ends_pack)) * ends_pack; }

  int steps_of(const RowPlan& plan) const {
    return int(ceil_div(plan.warp_width, int64_t(32) * plan.pack * packs_of(plan)));
  }
  // The steps that a thread can keep in shared memory if as many blocks are to be resident as registers allow; or, for
  // what should not be read twice, as many as fit.
  int kept_of(const RowPlan& plan) const {
    const int64_t steps = steps_of(plan);
    const int64_t beside =
        greater<int64_t>(1, max_block(plan.pack, Residency::shared, plan.ends) == 1024 ? 1024 / plan.policy.threads
                                                                                       : 512 / plan.policy.threads);
    const int64_t blocks = loaded_once<typename Problem::Source> ? 1 : beside;
    constexpr int64_t reserved = 1024 + int64_t(sizeof(Scratch<Problem>));
    const int64_t block = ex_.device().shared_per_block + 1024 - reserved;
    const int64_t room = greater(lesser(ex_.device().shared_per_sm / blocks - reserved, block), kept_bytes(plan));
    return room > block ? 0 : int(lesser(steps, room / kept_bytes(plan)));
  }
  static size_t fetched_bytes(int pack) {
    using Source = typename Problem::Source;
    return pack == wide ? sizeof(Fetched<Source, wide>)
           : pack == 1  ? sizeof(Fetched<Source, 1>)
                        : sizeof(Fetched<Source, middle>);
  }

  Status complete_split(RowPlan& plan) const {
    if (Problem::row_sink) return unsupported("policy: a split row cannot be quantized with a scale per row");
    bool clusters = false;
    KERNELS_TRY(has_clusters(clusters));
    if (clusters)
      return unsupported(
          "policy: rows are split in code without clusters alone, which share a row where there are some");
    if (plan.pack != wide && plan.pack != 1) plan.pack = 1;
    const int64_t blocks_wanted = ceil_div(4 * ex_.device().sm_count, p_.rows);
    const int64_t chunks = lesser<int64_t>(
        tuning::kMaxChunks,
        greater<int64_t>(1, lesser<int64_t>(blocks_wanted, p_.cols * scale / tuning::kFewRowsElements)));
    plan.width = int(round_up(ceil_div(p_.cols, chunks), kWidestPack));
    plan.chunks = int(ceil_div(p_.cols, plan.width));
    return check_parts(plan.chunks).within("policy: a split row needs a workspace of row_workspace_bytes()");
  }
  // Whether the workspace has room for the states of parts of rows.
  Status check_parts(int of_each) const {
    return check_workspace(ex_.workspace(), size_t(p_.rows) * of_each * sizeof(typename Problem::Op::State));
  }
};

}  // namespace detail
KERNELS_END
