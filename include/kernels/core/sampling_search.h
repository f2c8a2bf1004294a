// The search for the token that is drawn: how filters see a row, and how the row is narrowed down.
#pragma once

#include "sampling.h"

KERNELS_BEGIN
namespace detail {

// Adjusts a logit: bias, penalties, allowed tokens.
struct Adjust {
  const float* bias;
  const uint32_t* allowed;
  const int32_t* counts;
  float soft_cap, repetition, presence, frequency;

  KERNELS_HD Adjust(const SampleOptions& o, const SampleRules& rules, int64_t row)
      : bias(o.bias.p == nullptr ? nullptr : o.bias.at(row)),
        allowed(o.allowed.p == nullptr ? nullptr : o.allowed.at(row)),
        counts(o.counts.p == nullptr ? nullptr : o.counts.at(row)),
        soft_cap(o.soft_cap),
        repetition(rules.repetition),
        presence(rules.presence),
        frequency(rules.frequency) {}

  // listed: the token's Occurrences in the list of previous tokens.
  KERNELS_HD float operator()(float x, int64_t id, int64_t listed) const {
    if (allowed != nullptr && (allowed[id >> 5] >> (id & 31) & 1u) == 0) return -infinity<float>();
    if (soft_cap > 0.f) x = capped(x, soft_cap);
    if (bias != nullptr) x = add_once(x, bias[id]);
    const int64_t times = Occurrences::times(listed) + (counts != nullptr ? counts[id] : 0);
    if (times > 0 || Occurrences::prompted(listed)) x = x < 0.f ? times_once(x, repetition) : over_once(x, repetition);
    if (times > 0) x = add_once(add_once(x, -times_once(frequency, float(times))), -presence);
    return x;
  }
};

// ---- the search -----------------------------------------------------------------------------------------------------
//
// The algorithm is written once, for a Row that knows how a row is traversed and which threads work on it:
//
//   look(want, floor)      the largest key of the row, and a floor that at least `want` tokens reach (0: unknown)
//   visit(from, what)      calls what(key, id) for the row's tokens, distributed among the threads; keys below `from`
//                          may be skipped
//   list(from)             append(entry, key) for the tokens that are not below
//   bin(i, mass)           adds a token to one of kBins bins; clear_bins() before, gather_bins() after
//   append(entry, key)     adds to the list, which keeps at most kFew entries
//   sums(what, result)     four sums of what each thread adds to row.sum(i, value) during `what`
//   weigh(what)            the sum of what.mass_left(key, id) over the row's tokens
//   find(what, target)     after weigh(): shared().edge becomes the first token, in the order of ids, at which the
//                          cumulative sum exceeds the target
//   shared()               data that all threads see
//   is_leader(), is_first()  whether this thread is in the block that works between two sync(), or is the first of all
//   block()                that block: shared(), each(n, f), count(n, f), sum(n, f), scan(n, get, put),
//                          ranks(n, entries, put)

constexpr int kFew = 1024, kMostListed = 256, kBins = 1024, kBinBits = 10, kFirstShift = 20, kIdBits = 22;

struct SampleShared {
  uint64_t entries[kFew], sorted[kFew], weights[kFew];
  uint64_t mass[2 * kFew];
  uint64_t sums[4];
  uint64_t left, edge;
  uint32_t keys[kFew];
  uint32_t count[kBins];
  uint32_t listed, bin, bin_count;
};

// An entry combines what orders a token (larger is earlier) with its id (lower is earlier).
KERNELS_HD uint64_t entry_of(uint32_t first, uint32_t id) { return uint64_t(first) << 32 | uint32_t(~id); }
KERNELS_HD uint32_t id_of(uint64_t entry) { return ~uint32_t(entry); }
KERNELS_HD uint32_t first_of_entry(uint64_t entry) { return uint32_t(entry >> 32); }
KERNELS_HD uint64_t short_entry(uint32_t first, uint32_t id) {
  return uint64_t(first) << kIdBits | (uint32_t(kMostVocabulary - 1) - id);
}

// A share of a sum, at least 1.
KERNELS_HD uint64_t share_of(float p, uint64_t total) {
  const uint64_t share = uint64_t(times_once(double(p), double(total)));
  return share < 1 ? 1 : share > total ? total : share;
}

// The least weight of a token whose probability is at least p times the largest.
KERNELS_HD uint64_t least_weight_of(float p) { return share_of(p, weight_of(0)); }

enum class Stage : int { top_k, top_p, typical, draw, none };

// Which tokens the filters applied so far keep.
struct Kept {
  uint64_t least = uint64_t(kLowestKey + 1) << 32;  // entry, by logit
  uint64_t least_weight = 0;
  uint64_t nearest = 0;                             // entry, by distance from the center
  uint32_t center = 0;
  bool by_distance = false;

  KERNELS_HD uint32_t distance(uint32_t level) const { return level > center ? level - center : center - level; }
  KERNELS_HD bool has(uint32_t key, uint32_t id, uint32_t level) const {
    if (entry_of(key, id) < least) return false;
    if (least_weight > 0 && weight_of(level) < least_weight) return false;
    return !by_distance || entry_of(~distance(level), id) >= nearest;
  }
};

// No draft: tokens are drawn by their own weights.
struct NoDraft {
  KERNELS_HD static constexpr bool drafted() { return false; }
  KERNELS_HD bool is(uint32_t) const { return false; }
  KERNELS_HD uint64_t rest(uint32_t, uint64_t weight) const { return weight; }
  KERNELS_HD bool accepts(uint64_t, uint64_t) { return false; }
  KERNELS_HD void give_up() {}
};

// A drafted token, and q, the drafter's probabilities. With p those of the target, the draft is accepted with
// probability p / q; otherwise a token is drawn with weights max(p - q, 0). In weights: q's are scaled to the sum of
// p's.
template <class Q>
class DraftOf {
 public:
  KERNELS_HD DraftOf(const Q& q, int64_t row, int64_t token, int64_t vocabulary, uint64_t draw)
      : q_(&q), row_(row), token_(token >= 0 && token < vocabulary ? uint32_t(token) : ~0u), draw_(draw) {}

  KERNELS_HD bool drafted() const { return token_ != ~0u; }
  KERNELS_HD bool is(uint32_t id) const { return id == token_; }
  // Whether the drafted token, whose weight is `weight` of `total`, is accepted.
  KERNELS_HD bool accepts(uint64_t weight, uint64_t total) {
    total_ = total;
    return drafted() && high_product(draw_, share(token_)) < weight;
  }
  // The weight of a token if the draft is rejected.
  KERNELS_HD uint64_t rest(uint32_t id, uint64_t weight) const {
    if (!drafted() || weight == 0) return weight;
    const uint64_t other = share(id);
    return weight > other ? weight - other : 0;
  }
  // p equals q to the last bit: the remaining weights are all 0. The draft then counts as always accepted.
  KERNELS_HD void give_up() { token_ = ~0u; }

 private:
  KERNELS_HD uint64_t share(uint32_t id) const {
    const float q = q_->at(row_, id, token_);
    return q > 0.f ? uint64_t(times_once(double(q < 1.f ? q : 1.f), double(total_))) : 0;
  }
  const Q* q_;
  int64_t row_;
  uint32_t token_;
  uint64_t draw_, total_ = 0;
};

// What is done with each token of a row.
template <class Draft>
struct Visit {
  enum What { listing, binning, summing };
  What what = listing;
  Stage stage = Stage::none;
  Kept kept;
  Levels levels;
  Draft draft;
  // State of the search within a stage: the bin of the first round, if there was one, and the known bits of the entry.
  bool narrowed = false;
  uint32_t first_bin = 0;
  int shift = 0;
  uint64_t known = 0;

  KERNELS_HD Visit(const Levels& l, const Draft& d) : levels(l), draft(d) {}

  KERNELS_HD uint32_t first(uint32_t key, uint32_t level) const {
    return stage == Stage::typical ? ~kept.distance(level) : key;
  }
  KERNELS_HD uint32_t bin_of(uint32_t level) const {
    return (stage == Stage::typical ? kept.distance(level) : level) >> kFirstShift;
  }
  KERNELS_HD uint64_t mass(uint32_t id, uint32_t level) const {
    if (stage == Stage::top_k) return 1;
    const uint64_t weight = weight_of(level);
    return stage == Stage::draw ? draft.rest(id, weight) : weight;
  }

  KERNELS_HD uint64_t mass_left(uint32_t key, uint32_t id) const {
    const uint32_t level = levels(key);
    return kept.has(key, id, level) ? mass(id, level) : 0;
  }

  // The same for tokens that are drawn by their own weights and kept by their logits: without a branch, for
  // vectorization.
  KERNELS_HD bool is_plain() const { return stage == Stage::draw && !draft.drafted() && !kept.by_distance; }
  KERNELS_HD uint64_t plain_mass_left(uint32_t key, uint32_t id) const {
    const uint64_t weight = weight_of(levels(key));
    const bool is_left = (entry_of(key, id) >= kept.least) & (weight >= kept.least_weight);
    return is_left ? weight : 0;
  }

  template <class Row>
  KERNELS_HD void operator()(Row& row, uint32_t key, uint32_t id) const {
    const uint32_t level = levels(key);
    if (!kept.has(key, id, level)) return;
    if (what == summing) {
      const uint64_t weight = weight_of(level), product = weight * level;  // below 2^63
      row.sum(0, weight);
      row.sum(1, uint32_t(product));
      row.sum(2, product >> 32);
      if (draft.is(id)) row.sum(3, weight);
      return;
    }
    if (narrowed && bin_of(level) != first_bin) return;
    const uint64_t entry = short_entry(first(key, level), id);
    if (what == listing) {
      if (!narrowed || shift >= 64 || entry >> shift == known) row.append(entry_of(first(key, level), id), key);
      return;
    }
    if (narrowed && entry >> (shift + kBinBits) != known) return;
    row.bin(narrowed ? kBins - 1 - int(entry >> shift & (kBins - 1)) : int(bin_of(level)), mass(id, level));
  }
};

// The mean level, weighted: sum 1 + 2^32 sum 2, divided by sum 0.
KERNELS_HD uint32_t mean_level(uint64_t weights, uint64_t low, uint64_t high) {
  // Long division, bit by bit: the quotient has at most 30 bits.
  high += low >> 32;
  low &= 0xffffffffu;
  uint64_t rest = high % weights;
  uint32_t quotient = 0;  // high / weights is 0: the mean is below 2^32
  for (int bit = 31; bit >= 0; --bit) {
    rest = rest << 1 | (low >> bit & 1u);
    quotient <<= 1;
    if (rest >= weights) rest -= weights, quotient |= 1u;
  }
  return quotient;
}

// Finds, in the order of a stage, the token at which the cumulative mass first reaches the budget, budget_of(total
// mass). It is in shared().edge afterwards.
//
// The first round's bins span a 16th of a factor of two. If the bin in question holds too many tokens for the list,
// such as many equal logits, the following rounds search by the bits of its entries.
template <class Row, class V, class Budget>
KERNELS_HD void select(Row& row, V visit, const Budget& budget_of) {
  SampleShared& s = row.shared();
  uint64_t budget = 0;
  visit.narrowed = false;
  visit.shift = 64;
  KERNELS_ROLLED
  for (int round = 0;; ++round) {
    visit.what = V::binning;
    row.clear_bins();
    row.visit(0, visit);
    row.gather_bins();
    if (row.is_leader()) {
      auto& block = row.block();
      SampleShared& own = block.shared();
      const uint64_t sum = block.scan(
          kBins, [&own](int i) { return own.mass[i]; }, [&own](int i, uint64_t before) { own.mass[i] = before; });
      if (round == 0) budget = budget_of(sum);
      block.each(kBins, [&own, sum, budget](int i) {
        if (i == 0) own.listed = 0;
        const uint64_t before = own.mass[i], after = i + 1 < kBins ? own.mass[i + 1] : sum;
        if (before < budget && budget <= after)
          own.bin = uint32_t(i), own.bin_count = own.count[i], own.left = budget - before;
      });
    }
    row.sync();
    budget = s.left;
    if (round == 0) visit.narrowed = true, visit.first_bin = s.bin, visit.known = 0;
    else visit.known = visit.known << kBinBits | (kBins - 1 - s.bin);
    if (s.bin_count <= uint32_t(kFew)) break;
    visit.shift = round == 0 ? 5 * kBinBits : visit.shift - kBinBits;
  }
  visit.what = V::listing;
  row.visit(0, visit);
  row.sync();
  if (row.is_leader()) {
    auto& block = row.block();
    SampleShared& own = block.shared();
    const int n = int(own.listed);
    block.ranks(n, own.entries, [&own, &visit](int i, int rank) {
      own.sorted[rank] = own.entries[i];
      own.weights[rank] = visit.mass(id_of(own.entries[i]), visit.levels(own.keys[i]));
    });
    block.scan(
        n, [&own](int i) { return own.weights[i]; }, [&own](int i, uint64_t before) { own.mass[i] = before; });
    block.each(n, [&own, budget](int i) {
      if (i == 0) own.listed = 0;
      if (own.mass[i] < budget && budget <= own.mass[i] + own.weights[i]) own.edge = own.sorted[i];
    });
  }
  row.sync();
}

// The same for tokens that are all in the list, among which the k largest are. First they are sorted, with their
// weights;
template <class Block>
KERNELS_HD void rank_listed(Block& block, const Levels& levels) {
  SampleShared& s = block.shared();
  block.ranks(int(s.listed), s.entries, [&s, &levels](int i, int rank) {
    s.sorted[rank] = s.entries[i];
    s.weights[rank] = weight_of(levels(first_of_entry(s.entries[i])));
  });
}

// then the first n of them remain, until typical() drops some of these.
struct Ranked {
  int n;
  uint64_t total;
};
template <class Block>
KERNELS_HD uint64_t sum_ranked(Block& block, int n) {
  SampleShared& s = block.shared();
  return block.scan(n, [&s](int i) { return s.weights[i]; }, [&s](int i, uint64_t before) { s.mass[i] = before; });
}
template <class Block>
KERNELS_HD Ranked keep_first(Block& block, int k, const SampleRules& rules) {
  SampleShared& s = block.shared();
  Ranked left;
  left.n = lesser(k, int(s.listed));
  left.total = sum_ranked(block, left.n);
  const auto shorten = [&](const auto& keeps) {
    left.n = block.count(left.n, keeps);
    left.total = s.mass[left.n - 1] + s.weights[left.n - 1];
  };
  if (rules.top_p < 1.f) {
    const uint64_t share = share_of(rules.top_p, left.total);
    shorten([&s, share](int i) { return s.mass[i] < share; });
  }
  if (rules.min_p > 0.f) {
    const uint64_t least = least_weight_of(rules.min_p);
    shorten([&s, least](int i) { return s.weights[i] >= least; });
  }
  return left;
}
template <class Block>
KERNELS_HD void draw_ranked(Block& block, const Ranked& left, uint64_t draw) {
  SampleShared& s = block.shared();
  const uint64_t target = high_product(draw, left.total);
  block.each(left.n, [&s, target](int i) {
    if (s.mass[i] <= target && target < s.mass[i] + s.weights[i]) s.edge = s.sorted[i];
  });
}

// Applies every filter and draws. True: the draft is accepted.
template <class Block, class V>
KERNELS_HD bool choose_listed(Block& block, int k, const SampleRules& rules, V& visit, uint64_t draw) {
  SampleShared& s = block.shared();
  rank_listed(block, visit.levels);
  Ranked left = keep_first(block, k, rules);
  const int n = left.n;
  if (rules.typical < 1.f) {
    const auto product = [&s, &visit](int i) { return s.weights[i] * visit.levels(first_of_entry(s.sorted[i])); };
    const uint64_t low = block.sum(n, [&product](int i) { return uint64_t(uint32_t(product(i))); });
    const uint64_t high = block.sum(n, [&product](int i) { return product(i) >> 32; });
    Kept kept;
    kept.center = mean_level(left.total, low, high);
    block.each(n, [&s, &kept, &visit](int i) {
      const uint64_t entry = s.sorted[i];
      s.entries[i] = entry_of(~kept.distance(visit.levels(first_of_entry(entry))), id_of(entry));
    });
    uint64_t* const by_distance = s.mass + kFew;
    block.ranks(n, s.entries, [&s, by_distance](int i, int rank) {
      s.count[i] = uint32_t(rank);
      by_distance[rank] = s.weights[i];
    });
    block.scan(
        n, [by_distance](int i) { return by_distance[i]; },
        [by_distance](int i, uint64_t before) { by_distance[i] = before; });
    const uint64_t share = share_of(rules.typical, left.total);
    block.each(n, [&s, by_distance, share](int i) {
      if (by_distance[s.count[i]] >= share) s.weights[i] = 0;
    });
    left.total = sum_ranked(block, n);
  }
  if (visit.draft.drafted()) {
    const auto& draft = visit.draft;
    const uint64_t drafted =
        block.sum(n, [&s, &draft](int i) { return draft.is(id_of(s.sorted[i])) ? s.weights[i] : 0; });
    if (visit.draft.accepts(drafted, left.total)) return true;
    const auto rest = [&s, &draft](int i) { return draft.rest(id_of(s.sorted[i]), s.weights[i]); };
    if (block.sum(n, rest) > 0) {
      block.each(n, [&s, &rest](int i) { s.weights[i] = rest(i); });
      left.total = sum_ranked(block, n);
    }
  }
  draw_ranked(block, left, draw);
  return false;
}

}  // namespace detail
KERNELS_END
