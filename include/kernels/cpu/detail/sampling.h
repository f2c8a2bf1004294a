// A row of logits on the CPU, for core/sampling_row.h: up to 1024 groups of consecutive tokens; groups below a floor
// are skipped.
#pragma once

#include <algorithm>

#include "../../core/row_call.h"
#include "../../core/sampling_row.h"
#include "row/engine.h"

KERNELS_BEGIN
namespace detail {
namespace host {

struct SampleBlock {
  SampleShared& own;
  SampleShared& shared() const { return own; }

  template <class F>
  void each(int n, const F& f) const {
    for (int i = 0; i < n; ++i) f(i);
  }
  template <class F>
  int count(int n, const F& f) const {
    int all = 0;
    for (int i = 0; i < n; ++i) all += f(i) ? 1 : 0;
    return all;
  }
  template <class F>
  uint64_t sum(int n, const F& f) const {
    uint64_t all = 0;
    for (int i = 0; i < n; ++i) all += f(i);
    return all;
  }
  template <class Get, class Put>
  uint64_t scan(int n, const Get& get, const Put& put) const {
    uint64_t before = 0;
    for (int i = 0; i < n; ++i) {
      const uint64_t value = get(i);
      put(i, before);
      before += value;
    }
    return before;
  }
  template <class Put>
  void ranks(int n, const uint64_t* entries, const Put& put) const {
    int order[kFew];
    for (int i = 0; i < n; ++i) order[i] = i;
    std::sort(order, order + n, [entries](int a, int b) { return entries[a] > entries[b]; });
    for (int i = 0; i < n; ++i) put(order[i], i);
  }
};

// What a thread needs for a row: about 90 KB, on its stack.
struct SampleRoom {
  static constexpr int kGroups = 1024, kTile = 8192;
  SampleShared shared;
  uint32_t greatest[kGroups];
  int32_t counts[kTile];
};

template <class Source>
class SampleRow {
 public:
  SampleRow(const Source& source, const SampleOptions& options, const SampleRules& rules, int64_t row,
            int64_t vocabulary, SampleRoom& room, const Team& team)
      : source_(source),
        packs_(source, source, vocabulary),
        adjust_(options, rules, row),
        adjusted_(options.adjusted()),
        row_(row),
        vocabulary_(vocabulary),
        room_(room),
        team_(team),
        block_{room.shared} {
    if (options.previous.p != nullptr) {
      previous_ = options.previous.at(row);
      listed_ = options.lengths[row];
      if (options.prompts != nullptr) prompt_ = options.prompts[row];
    }
    const int64_t least = (vocabulary + SampleRoom::kGroups - 1) / SampleRoom::kGroups;
    size_ = (least + 63) / 64 * 64;
    groups_ = int((vocabulary + size_ - 1) / size_);
    room_.shared.listed = 0;
  }

  SampleShared& shared() { return room_.shared; }
  SampleBlock& block() { return block_; }
  bool is_leader() const { return true; }
  bool is_first() const { return true; }
  void sync() const {}

  uint32_t look(int want, uint32_t& floor) {
    share_groups([this](int g) {
      uint32_t greatest = 0;
      each_block(g, [&greatest](const uint32_t* keys, int n, uint32_t) {
        for (int i = 0; i < n; ++i) greatest = greater(greatest, keys[i]);
      });
      room_.greatest[g] = greatest;
    });
    uint32_t top = 0;
    for (int g = 0; g < groups_; ++g) top = greater(top, room_.greatest[g]);
    floor = want == 1 ? top : 0;
    if (want > 1 && want <= groups_) {
      uint32_t sorted[SampleRoom::kGroups];
      std::copy(room_.greatest, room_.greatest + groups_, sorted);
      std::nth_element(sorted, sorted + (want - 1), sorted + groups_, [](uint32_t a, uint32_t b) { return a > b; });
      floor = sorted[want - 1];
    }
    return top;
  }

  // The key of one token, in a row without adjustments.
  uint32_t key_at(int64_t id) const {
    return key_of(convert<float>(resolve(source_, fetch<1>(source_, row_, id), row_, id)).v[0]);
  }

  template <class V>
  void visit(uint32_t from, const V& what) {
    for (int g = 0; g < groups_; ++g) {
      if (room_.greatest[g] >= from) each_of(g, [this, &what](uint32_t key, uint32_t id) { what(*this, key, id); });
    }
  }
  void list(uint32_t from) {
    for (int g = 0; g < groups_; ++g) {
      if (room_.greatest[g] < from) continue;
      each_of(g, [this, from](uint32_t key, uint32_t id) {
        if (key >= from) append(entry_of(key, id), key);
      });
    }
  }
  void clear_bins() {
    std::fill(room_.shared.mass, room_.shared.mass + kBins, uint64_t(0));
    std::fill(room_.shared.count, room_.shared.count + kBins, 0u);
  }
  void gather_bins() const {}
  void bin(int i, uint64_t mass) {
    room_.shared.mass[i] += mass;
    ++room_.shared.count[i];
  }
  void append(uint64_t entry, uint32_t key) {
    const uint32_t at = room_.shared.listed++;
    if (at >= uint32_t(kFew)) return;
    room_.shared.entries[at] = entry;
    room_.shared.keys[at] = key;
  }
  template <class V>
  void sums(const V& what, uint64_t (&result)[4]) {
    for (int i = 0; i < 4; ++i) room_.shared.sums[i] = 0;
    visit(0, what);
    for (int i = 0; i < 4; ++i) result[i] = room_.shared.sums[i];
  }
  void sum(int i, uint64_t value) { room_.shared.sums[i] += value; }

  // The groups' sums use the memory of the bins.
  template <class V>
  uint64_t weigh(const V& what) {
    share_groups([this, &what](int g) {
      uint64_t mass = 0;
      if (room_.greatest[g] >= first_of_entry(what.kept.least)) {
        each_block(g, [what, &mass](const uint32_t* keys, int n, uint32_t id) {
          uint64_t some = 0;
          if (what.is_plain())
            for (int i = 0; i < n; ++i) some += what.plain_mass_left(keys[i], id + uint32_t(i));
          else
            for (int i = 0; i < n; ++i) some += what.mass_left(keys[i], id + uint32_t(i));
          mass += some;
        });
      }
      room_.shared.mass[g] = mass;
    });
    uint64_t all = 0;
    for (int g = 0; g < groups_; ++g) all += room_.shared.mass[g];
    return all;
  }
  template <class V>
  void find(const V& what, uint64_t target) {
    int g = 0;
    for (; target >= room_.shared.mass[g]; ++g) target -= room_.shared.mass[g];
    bool found = false;
    each_of(g, [this, &what, &target, &found](uint32_t key, uint32_t id) {
      const uint64_t mass = what.mass_left(key, id);
      if (!found && target < mass) found = true, room_.shared.edge = entry_of(key, id);
      target -= mass;
    });
  }

 private:
  // Calls f(group) for all groups, on all threads; on one thread if previous tokens are counted, as there is one buffer
  // for the counts.
  template <class F>
  void share_groups(const F& f) {
    Team team = team_;
    if (listed_ > 0) team.threads = 1;
    parallel_shares(team, groups_, [&f](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) f(int(g));
    });
  }
  // Calls f(key, id) for the tokens of a group.
  template <class F>
  KERNELS_INLINE void each_of(int group, const F& f) {
    each_block(group, [&f](const uint32_t* keys, int n, uint32_t id) KERNELS_INLINE {
      for (int i = 0; i < n; ++i) f(keys[i], id + uint32_t(i));
    });
  }
  // Calls f(keys, n, first id) for blocks of a group's tokens, so that compilers vectorize loops over them.
  template <class F>
  KERNELS_INLINE void each_block(int group, const F& f) {
    const int64_t begin = group * size_, end = lesser(vocabulary_, begin + size_);
    if (listed_ > 0 && (begin < counted_ || end > counted_ + SampleRoom::kTile)) count_previous(begin);
    constexpr int most = 256;
    alignas(64) float logits[most];
    alignas(64) uint32_t keys[most];
    for (int64_t at = begin; at < end; at += most) {
      const int n = int(lesser(end - at, int64_t(most)));
      packs_.each(at, at + n, [&](auto width, int64_t col) KERNELS_INLINE {
        constexpr int N = decltype(width)::value;
        const auto x = convert<float>(resolve(source_, fetch<N>(source_, row_, col), row_, col));
        for (int i = 0; i < N; ++i) logits[col - at + i] = x.v[i];
      });
      for (int i = 0; adjusted_ && i < n; ++i)
        logits[i] = adjust_(logits[i], at + i, listed_ > 0 ? room_.counts[at + i - counted_] : 0);
      for (int i = 0; i < n; ++i) keys[i] = key_of(logits[i]);
      f(keys, n, uint32_t(at));
    }
  }
  // Counts how often the tokens from `begin` on occur in the list.
  void count_previous(int64_t begin) {
    std::fill(room_.counts, room_.counts + SampleRoom::kTile, 0);
    for (int64_t i = 0; i < listed_; ++i) {
      const int64_t at = previous_[i] - begin;
      if (at >= 0 && at < SampleRoom::kTile) room_.counts[at] = Occurrences::with(room_.counts[at], i < prompt_);
    }
    counted_ = begin;
  }

  const Source& source_;
  Packs<Source, Source> packs_;
  Adjust adjust_;
  bool adjusted_;
  int64_t row_, vocabulary_, size_ = 0;
  int groups_ = 0;
  SampleRoom& room_;
  const Team& team_;
  SampleBlock block_;
  const int32_t* previous_ = nullptr;
  int64_t listed_ = 0, prompt_ = 0, counted_ = INT64_MAX / 2;
};

// Distributes the rows of a problem among threads, or, if there is a single row, its groups.
template <class P>
void run_samples(const Team& all, const P& p) {
  const Team team = all.for_work(double(p.rows) * double(p.vocabulary));
  Team inside = team;
  if (p.rows > 1) inside.threads = 1;
  parallel_shares(team, p.rows, [&](int64_t begin, int64_t end) {
    SampleRoom room;
    for (int64_t row = begin; row < end; ++row) {
      const SampleRules rules = p.rules(row);
      SampleRow<typename P::Source> one(p.source, p.options, rules, row, p.vocabulary, room, inside);
      p.solve(one, rules, row);
    }
  });
}

}  // namespace host
}  // namespace detail
KERNELS_END
