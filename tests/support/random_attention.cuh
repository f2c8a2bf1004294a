// Makes the calls that random_attention.h draws, on the GPU, each against the oracle of attention.h. Beside what is
// right it is checked
//
// - that nothing is written around results, logsumexps and the workspace, nor to anything that is only read,
// - that the same call gives the same bits: in a workspace that holds something else, without logsumexps, in a graph,
// - that a sequence has the same bits alone, where docs/attention.md says so,
// - that what is to be refused is refused for that reason, with nothing written.
#pragma once

#include "gpu_decode.cuh"
#include "random_attention.h"
#include "random_calls.cuh"

namespace test {

// ---- scores ---------------------------------------------------------------------------------------------------------

struct ScoreNumbersThere {
  OnDevice<k::half> biases{score_numbers().biases}, zeros{score_numbers().zeros};
  OnDevice<uint32_t> bits{score_numbers().bits};
  OnDevice<float> slopes{score_numbers().slopes}, sinks{score_numbers().sinks};
  bool unchanged() const {
    return biases.unchanged() && zeros.unchanged() && bits.unchanged() && slopes.unchanged() && sinks.unchanged();
  }
};
inline const ScoreNumbersThere& score_numbers_there() {
  static const ScoreNumbersThere all;
  return all;
}

// The parts of a drawn score besides its window, chosen at run time so that all of them are one type. Sequence `first`
// is the first of the call.
struct AnyMaps : k::Score {
  int maps[4] = {}, count;
  bool has_bits, has_tree, own_mask, has_sinks;
  k::SoftCap cap;
  k::Alibi alibi;
  k::ScoreBias<k::half> bias;
  k::Bitmask bits, tree;
  k::Sinks<float> sinks;

  static k::ScoreBias<k::half> bias_at(const TableAt& at, int64_t first) {
    const k::half* const p = score_numbers_there().biases.data() + at.first + first * at.batch;
    return k::score_bias(p, at.batch, at.head, at.query);
  }
  static const uint32_t* words_at(const TableAt& at, int64_t first) {
    return score_numbers_there().bits.data() + at.first + first * at.batch;
  }
  AnyMaps(const DrawnScore& s, int64_t first)
      : count(int(s.maps.size())),
        has_bits(s.has_bits),
        has_tree(s.has_tree),
        own_mask(s.own_mask),
        has_sinks(s.has_sinks),
        cap(s.cap),
        alibi(score_numbers_there().slopes.data() + s.slopes),
        bias(bias_at(s.bias, first)),
        bits(k::bitmask(words_at(s.bits, first), s.bits.query, s.bits.batch).head_stride(s.bits.head)),
        tree(k::tree_mask(words_at(s.tree, first), s.tree.query, s.tree.batch).head_stride(s.tree.head)),
        sinks(score_numbers_there().sinks.data() + s.sinks) {
    for (int i = 0; i < count; ++i) maps[i] = int(s.maps[size_t(i)]);
  }

  template <int N>
  KERNELS_HD k::Pack<float, N> transform(k::Pack<float, N> logits, const k::ScoreAt& at) const {
    KERNELS_ROLLED
    for (int i = 0; i < count; ++i) {
      switch (maps[i]) {
        case int(Map::cap):
          logits = cap.transform(logits, at);
          break;
        case int(Map::alibi):
          logits = alibi.transform(logits, at);
          break;
        case int(Map::bias):
          logits = bias.transform(logits, at);
          break;
        default:
          logits = logits * 0.5f;
      }
    }
    return logits;
  }
  KERNELS_HD bool visible(const k::ScoreAt& at) const {
    return (!has_bits || bits.visible(at)) && (!has_tree || tree.visible(at)) &&
           (!own_mask || at.head % 2 == 0 || at.key % 3 != 0);
  }
  KERNELS_HD float sink(int64_t head) const { return has_sinks ? sinks.sink(head) : -k::infinity<float>(); }
};
// Masks that are read for 32 keys at once.
struct Maps : AnyMaps {
  using AnyMaps::AnyMaps;
  KERNELS_HD uint32_t visible_keys(const k::ScoreAt& at) const {
    uint32_t all = ~0u;
    if (has_bits) all &= bits.visible_keys(at);
    if (has_tree) all &= tree.visible_keys(at);
    if (own_mask && at.head % 2 != 0) {
      for (int i = 0; i < 32; ++i) all &= (at.key + i) % 3 == 0 ? ~(1u << i) : ~0u;
    }
    return all;
  }
};
// Masks that are read one by one, and a range of keys: the chunk of a query and the one before it.
struct RangeMaps : AnyMaps {
  int64_t chunk;
  RangeMaps(const DrawnScore& s, int64_t first) : AnyMaps(s, first), chunk(s.chunk) {}
  KERNELS_HD int64_t chunk_of(int64_t query, int64_t q_len, int64_t kv_len) const {
    const int64_t place = query + kv_len - q_len;
    return place < 0 ? 0 : place / chunk;
  }
  KERNELS_HD bool visible(const k::ScoreAt& at) const {
    if (!AnyMaps::visible(at)) return false;
    if (chunk == 0) return true;
    const int64_t mine = chunk_of(at.query, at.q_len, at.kv_len), of_key = at.key / chunk;
    return of_key >= mine - 1 && of_key <= mine;
  }
  KERNELS_HD k::KeyRange kv_range(const k::ScoreQueries& q) const {
    if (chunk == 0) return {0, q.kv_len};
    return {(chunk_of(q.first, q.q_len, q.kv_len) - 1) * chunk, (chunk_of(q.last, q.q_len, q.kv_len) + 1) * chunk};
  }
};

template <class A, class B>
using Pair = decltype(std::declval<A>() & std::declval<B>());
using MapsInWindow = Pair<k::Window, Maps>;
using RangesInWindow = Pair<k::Window, RangeMaps>;
using MapsAndBias = Pair<Pair<k::Window, Maps>, k::ScoreBias<k::half>>;

template <class S>
struct MakeScore {
  static S from(const DrawnScore& s, int64_t first) { return S(s, first); }
  static constexpr bool maps = true, ranges = std::is_same<S, RangeMaps>::value, bias = false;
};
template <>
struct MakeScore<k::NoMask> {
  static k::NoMask from(const DrawnScore&, int64_t) { return k::no_mask(); }
  static constexpr bool maps = false, ranges = false, bias = false;
};
template <>
struct MakeScore<k::Window> {
  static k::Window from(const DrawnScore& s, int64_t) {
    return k::window(s.left, s.right, s.top_left ? k::Align::top_left : k::Align::bottom_right);
  }
  static constexpr bool maps = false, ranges = false, bias = false;
};
template <>
struct MakeScore<k::ScoreBias<k::half>> {
  static k::ScoreBias<k::half> from(const DrawnScore& s, int64_t first) {
    const k::half* const zeros = score_numbers_there().zeros.data();
    return s.has_last_bias ? AnyMaps::bias_at(s.last_bias, first) : k::score_bias(zeros, 0, 0, 0);
  }
  static constexpr bool maps = false, ranges = false, bias = true;
};
template <class A, class B>
struct MakeScore<k::ScorePair<A, B>> {
  static auto from(const DrawnScore& s, int64_t first) {
    return MakeScore<A>::from(s, first) & MakeScore<B>::from(s, first);
  }
  static constexpr bool maps = MakeScore<A>::maps || MakeScore<B>::maps,
                        ranges = MakeScore<A>::ranges || MakeScore<B>::ranges,
                        bias = MakeScore<A>::bias || MakeScore<B>::bias;
};

// ---- families -------------------------------------------------------------------------------------------------------

// What is compiled: the types of a call.
template <class Key_, class Value_ = Key_, class KeyScale_ = k::Nothing, class ValueScale_ = KeyScale_>
struct KvTypes {
  using Key = Key_;
  using Value = Value_;
  using KeyScale = KeyScale_;
  using ValueScale = ValueScale_;
};
constexpr unsigned kWorkspace = 1, kAnyOrder = 2, kDecodes = 4, kLatents = 8;

template <int kDim, ViewKind kView, class TQ_, class TO_, class Kv_, class Score_, unsigned kFlags = 0>
struct Family {
  using TQ = TQ_;
  using TO = TO_;
  using Kv = Kv_;
  using Score = Score_;
  static constexpr int dim = kDim;
  static constexpr ViewKind view = kView;
  static constexpr bool workspace = (kFlags & kWorkspace) != 0, heads = (kFlags & kAnyOrder) != 0,
                        decodes = (kFlags & kDecodes) != 0, latents = (kFlags & kLatents) != 0;
};

template <class E>
constexpr int64_t elements_of_16_bytes = Element<E>::per_unit > 1 ? 32
                                                                  : 16 / int64_t(sizeof(typename Element<E>::Unit));

template <class F>
Kinds kinds_of(const char* name) {
  using Kv = typename F::Kv;
  using Score = MakeScore<typename F::Score>;
  constexpr bool e4m3 = std::is_same<typename F::TQ, k::float8_e4m3>::value;
  Kinds kinds{};
  kinds.name = name;
  kinds.most_dim = F::dim > 0 ? F::dim : 576, kinds.any_dim = F::dim == 0;
  kinds.view = F::view;
  kinds.key_pack = elements_of_16_bytes<typename Kv::Key>, kinds.value_pack = elements_of_16_bytes<typename Kv::Value>;
  kinds.scaled_keys = !std::is_same<typename Kv::KeyScale, k::Nothing>::value;
  kinds.scaled_values = !std::is_same<typename Kv::ValueScale, k::Nothing>::value;
  kinds.of_float = std::is_same<typename Kv::Key, float>::value || std::is_same<typename Kv::Value, float>::value;
  kinds.in_place = std::is_same<typename F::TQ, typename F::TO>::value;
  kinds.heads = F::heads, kinds.workspace = F::workspace, kinds.decodes = F::decodes, kinds.latents = F::latents;
  kinds.maps = Score::maps, kinds.ranges = Score::ranges, kinds.bias = Score::bias;
  kinds.no_mask = std::is_same<typename F::Score, k::NoMask>::value;
  kinds.in_8_bits = e4m3 && !F::decodes && !kinds.scaled_values;
  return kinds;
}

// ---- one call -------------------------------------------------------------------------------------------------------

// As nhd() or hnd() tell of it, whose positions and heads then are checked.
template <class Tensor>
Tensor with_extent(const Tensor& tensor, const Placement& where, int64_t dim) {
  if constexpr (Tensor::scaled) {
    return tensor;
  } else {
    const auto* const p = tensor.at(k::KvSlot{0, 0, 0}, 0);
    using Format = typename Tensor::Format;
    if constexpr (Tensor::words) {
      return where.heads_first() ? k::hnd<Format>(p, where.capacity, where.heads, dim)
                                 : k::nhd<Format>(p, where.capacity, where.heads, dim);
    } else {
      return where.heads_first() ? k::hnd(p, where.capacity, where.heads, dim)
                                 : k::nhd(p, where.capacity, where.heads, dim);
    }
  }
}

// How a call is made once more.
struct How {
  bool lse = true, in_graph = false;
  int64_t alone = -1;  // the sequence
  int fill = 0xff;     // of the workspace, before
};

template <class F>
class RandomAttention {
  using TQ = typename F::TQ;
  using TO = typename F::TO;
  using Kv = typename F::Kv;
  using Keys = KvSide<typename Kv::Key, typename Kv::KeyScale, DeviceMemory>;
  using Values = KvSide<typename Kv::Value, typename Kv::ValueScale, DeviceMemory>;
  static constexpr bool of_float = stored<typename Kv::Key> == DType::f32 || stored<typename Kv::Value> == DType::f32;

 public:
  RandomAttention(Tally& t, const DrawnAttention& drawn)
      : t_(t),
        d_(drawn),
        c_(drawn.c),
        where_(d_.layout, c_.kv_lens, c_.kv_heads, d_.page),
        key_(mix(d_.seed), where_, c_.dim, d_.grain, d_.key_spread, d_.key.shift, d_.key.gap),
        // Those that are columns of the keys need no memory of their own.
        value_(mix(d_.seed) + 1, where_, d_.column >= 0 ? 8 : c_.value_dim(), d_.grain, 1, d_.value.shift,
               d_.value.gap),
        data_(c_, d_.query_spread),
        lengths_(where_.short_lengths),
        kv_offsets_(where_.offsets),
        table_(where_.table),
        offsets_(data_.offsets),
        no_results_(data_.o.bytes()),
        no_lse_(data_.lse.bytes()),
        given_(data_.q.bytes()) {
    for (int64_t row = 0; row < data_.q.rows(); ++row) {
      for (int64_t x = 0; x < data_.q.cols(); ++x) queries_.push_back(float(data_.q.value(row, x)));
    }
    if constexpr (F::heads) {
      if (d_.query_order >= 0) {
        query_heads_ = spread<TQ>(d_.query_order, c_.dim, Poison::nan);
        query_heads_->fill([&](int64_t row, int64_t col) { return data_.q.get(row, col); });
      }
    }
  }

  void run() {
    run_calls();
    t_.expect(data_.q.unchanged() && (!query_heads_ || query_heads_->unchanged()), "queries were changed");
    t_.expect(key_.unchanged() && value_.unchanged(), "keys or values were changed");
    t_.expect(lengths_.unchanged() && kv_offsets_.unchanged() && table_.unchanged() && offsets_.unchanged(),
              "lengths, offsets or pages were changed");
  }

 private:
  void run_calls() {
    const Refused refused = d_.refused == Refused::no && refuses_mode() ? Refused::mode : d_.refused;
    if (refused != Refused::no) return check_refused(refused);
    if (!call({})) return;
    check_results();
    const std::vector<unsigned char> results = data_.o.bytes(), lse = data_.lse.bytes();
    How again;
    again.fill = 0x3c, again.lse = !d_.again_without_lse, again.in_graph = d_.again_in_graph;
    if (call(again)) {
      t_.expect(data_.o.bytes() == results, "other bits the second time");
      t_.expect(data_.lse.bytes() == (again.lse ? lse : no_lse_),
                again.lse ? "another logsumexp the second time" : "a logsumexp that was not asked for");
    }
    if (F::decodes && c_.splits == 0) return;
    for (const int64_t b : d_.alone) {
      How alone;
      alone.alone = b, alone.fill = 0;
      if (call(alone)) check_alone(b, results, lse);
    }
  }
  int64_t first_row(int64_t b) const { return data_.offsets[size_t(b)]; }
  int64_t end_row(int64_t b) const { return data_.offsets[size_t(b) + 1]; }

  // ---- arguments

  template <class T>
  std::unique_ptr<SpreadHeads<T, DeviceMemory>> spread(int order, int64_t dim, Poison poison) const {
    const int64_t batch = c_.ragged_q ? 1 : d_.batch(), length = d_.rows() / batch;
    const HeadStrides strides = head_strides(batch, length, c_.heads, dim)[size_t(order)];
    return std::make_unique<SpreadHeads<T, DeviceMemory>>(strides, batch, length, c_.heads, dim, poison);
  }
  template <class T>
  k::Heads heads_of(const SpreadHeads<T, DeviceMemory>& spread, int64_t dim) const {
    return c_.ragged_q ? k::heads(dim, spread.strides().token, spread.strides().head) : spread.where();
  }
  auto source() const {
    const TQ* const p = data_.q.data();
    if constexpr (F::heads) {
      if (query_heads_) {
        const TQ* const apart = query_heads_->data();
        return k::load(apart, heads_of(*query_heads_, c_.dim));
      }
      return k::load(p, k::heads(c_.dim, data_.q.ld(), c_.dim));
    } else {
      return k::load(p, data_.q.ld());
    }
  }
  auto sink() const {
    TO* const p = d_.in_place ? reinterpret_cast<TO*>(data_.q.data()) : data_.o.data();
    const int64_t ld = d_.in_place ? data_.q.ld() : data_.o.ld();
    if constexpr (F::heads) {
      if (result_heads_) return k::store(result_heads_->data(), heads_of(*result_heads_, c_.value_dim()));
      return k::store(p, k::heads(c_.value_dim(), ld, c_.value_dim()));
    } else {
      return k::store(p, ld);
    }
  }
  auto key_tensor() const { return d_.told_extent ? with_extent(key_.tensor(), where_, c_.dim) : key_.tensor(); }
  auto value_tensor() const {
    if constexpr (F::latents) {
      if (d_.column >= 0) {
        const auto keys = key_.tensor();
        const auto* const p = keys.at({0, 0, 0}, 0);
        return k::strided(p + d_.column, keys.at({1, 0, 0}, 0) - p, keys.at({0, 1, 0}, 0) - p,
                          keys.at({0, 0, 0}, 1) - p);
      }
    }
    return d_.told_extent ? with_extent(value_.tensor(), where_, c_.value_dim()) : value_.tensor();
  }
  k::Lengths lengths(int64_t first) const {
    const int32_t* const there = lengths_.data();
    return d_.told_length ? k::Lengths(c_.kv_lens[0]) : k::Lengths(there + first);
  }
  // From sequence `first` on.
  auto view(int64_t first) const {
    if constexpr (F::view == ViewKind::ragged)
      return k::ragged_kv(key_tensor(), value_tensor(), kv_offsets_.data() + first);
    else if constexpr (F::view == ViewKind::paged)
      return k::paged_kv(key_tensor(), value_tensor(),
                         k::pages(table_.data() + first * where_.table_ld, where_.table_ld, where_.page),
                         lengths(first));
    else
      return k::dense_kv(key_tensor(), value_tensor(), lengths(0));
  }
  k::Attention options(const How& how) const {
    k::Attention all;
    if (c_.scale != 0) all.scale(c_.scale);
    if (d_.set_splits) all.splits(c_.splits);
    if (how.lse) all.lse(data_.lse.data(), data_.lse.ld());
    if (d_.new_keys >= 0) all.new_keys(d_.new_keys);
    return all.most_keys(c_.most_keys).in_8_bits(d_.in_8_bits);
  }
  k::Exec exec() const {
    k::DeviceInfo device = k::Exec(stream_).device();
    if (d_.multiprocessors > 0) device.sm_count = std::min(device.sm_count, d_.multiprocessors);
    return k::Exec(stream_, device).programmatic(d_.programmatic).constant_weights(d_.constant_weights);
  }

  // ---- calls

  size_t workspace_bytes(const k::Exec& ex, const k::AttentionShape& shape, const k::Attention& options) const {
    if (d_.refused == Refused::splits) return 1 << 20;  // there is no such number of bytes
    if (F::decodes) return k::decode_workspace_bytes(ex, shape, options);
    if (!F::workspace) return 0;
    return d_.largest_workspace ? k::attention_workspace_bytes_up_to(ex, shape, options)
                                : k::attention_workspace_bytes(ex, shape, options);
  }
  k::Status launch(const k::Exec& ex, const k::AttentionShape& shape, int64_t first, const k::Workspace& workspace,
                   const k::Attention& options) const {
    const auto score = MakeScore<typename F::Score>::from(d_.score, first);
    if constexpr (F::decodes)
      return k::decode<F::dim>(ex, source(), view(first), sink(), shape, score, workspace, options,
                               static_cast<k::DecodeMode>(d_.mode));
    else if constexpr (F::workspace)
      return k::attention<F::dim>(ex, source(), view(first), sink(), shape, score, workspace, options);
    else
      return k::attention<F::dim>(ex, source(), view(first), sink(), shape, score, options);
  }

  // Makes a call, whose results data_ then holds. Where a dense sequence is alone, the others have no queries; of other
  // layouts it is the call's only one.
  bool call(const How& how, Refused refused = Refused::no) {
    data_.o.restore(no_results_), data_.lse.restore(no_lse_);
    if (d_.in_place) data_.q.restore(given_);
    if constexpr (F::heads) {
      if (d_.result_order >= 0) result_heads_ = spread<TO>(d_.result_order, c_.value_dim(), Poison::garbage);
    }
    k::AttentionShape shape{d_.batch(), d_.q_len, c_.heads, c_.kv_heads, c_.dim, c_.v_dim};
    if (c_.ragged_q) shape.q_offsets = offsets_.data(), shape.tokens = d_.tokens;
    int64_t first = 0;
    std::unique_ptr<OnDevice<int32_t>> others_empty;
    if (how.alone >= 0) {
      // decode() chooses its tiles by the most queries of any sequence, and with them the last bits.
      if (!F::decodes) shape.q_len = end_row(how.alone) - first_row(how.alone);
      if constexpr (F::view == ViewKind::dense) {
        std::vector<int32_t> all(size_t(d_.batch()) + 1, int32_t(first_row(how.alone)));
        std::fill(all.begin() + how.alone + 1, all.end(), int32_t(end_row(how.alone)));
        others_empty = std::make_unique<OnDevice<int32_t>>(all);
        shape.q_offsets = others_empty->data();
      } else {
        first = how.alone, shape.batch = 1, shape.q_offsets = offsets_.data() + first;
      }
    }
    const k::Exec ex = exec();
    const k::Attention options = this->options(how);
    const size_t bytes = workspace_bytes(ex, shape, options) + size_t(d_.spare_bytes);
    const Scratch memory(bytes + (refused == Refused::odd_workspace ? 8 : 0), how.fill);
    k::Workspace workspace{memory.data(), bytes};
    if (refused == Refused::small_workspace) workspace.bytes -= size_t(d_.spare_bytes) + 1;
    if (refused == Refused::odd_workspace) workspace.ptr = memory.data() + 8;
    k::Status status;
    run_in(stream_, how.in_graph, [&] { status = launch(ex, shape, first, workspace, options); });
    check_cuda(cudaGetLastError());
    if (refused != Refused::no) return !status.ok() && says(refused, status);
    const int64_t from = how.alone >= 0 ? first_row(how.alone) : 0,
                  to = how.alone >= 0 ? end_row(how.alone) : d_.rows();
    t_.expect(memory.intact(), "wrote outside the workspace");
    t_.expect(fetch(from, to), "wrote outside its rows, or another sequence's");
    return t_.expect(status.ok(), "%s", status.reason());
  }

  // Rows [from, to) to where the checks look for them, which nothing else has been written to.
  bool fetch(int64_t from, int64_t to) {
    bool intact = true;
    data_.lse.download();
    if (d_.in_place) {
      data_.q.download();
      const std::vector<unsigned char> now = data_.q.bytes();
      for (int64_t row = from; row < to; ++row) {
        for (int64_t x = 0; x < data_.q.cols(); ++x) {
          if constexpr (std::is_same<TQ, TO>::value) data_.o.set(row, x, data_.q.get(row, x));
          data_.q.set(row, x, make<TQ>(queries_[size_t(row * data_.q.cols() + x)]));
        }
      }
      intact = data_.q.bytes() == given_;  // all other rows are the queries still
      data_.q.restore(now);
      data_.o.upload();
    } else if (result_heads_) {
      intact = result_heads_->download();
      for (int64_t row = from; row < to; ++row) {
        for (int64_t x = 0; x < data_.o.cols(); ++x) data_.o.set(row, x, result_heads_->get(row, x));
      }
      data_.o.upload();
    } else {
      data_.o.download();
      intact = data_.o.intact();
    }
    return intact && data_.lse.intact();
  }

  // ---- checks

  bool says(Refused refused, const k::Status& status) {
    return t_.expect(
        status.code() != k::Code::device && std::string(status.reason()).find(text_of(refused)) != std::string::npos,
        "refused for another reason: %s", status.reason());
  }
  void check_refused(Refused refused) {
    const bool was_refused = call({}, refused);
    t_.expect(was_refused, "not refused: %s", text_of(refused));
    t_.expect(data_.o.unchanged() && data_.lse.unchanged() && (!result_heads_ || result_heads_->unchanged()),
              "refused, but something was written");
  }

  void check_alone(int64_t b, const std::vector<unsigned char>& results, const std::vector<unsigned char>& lse) {
    const std::vector<unsigned char> alone = data_.o.bytes(), lse_alone = data_.lse.bytes();
    // The sequence's rows are those of the batch, and all others have not been written.
    const auto others = [&](const auto& m, const std::vector<unsigned char>& got,
                            const std::vector<unsigned char>& want, const std::vector<unsigned char>& blank) {
      using T = std::decay_t<decltype(m.get(0, 0))>;
      constexpr size_t guard = size_t(Device<T>::guard);
      const size_t begin = guard + reinterpret_cast<uintptr_t>(m.data()) % guard, row = size_t(m.ld()) * sizeof(T),
                   width = size_t(m.cols()) * sizeof(T);
      int64_t wrong = 0;
      for (int64_t r = 0; r < m.rows(); ++r) {
        const auto& source = r >= first_row(b) && r < end_row(b) ? want : blank;
        const size_t at = begin + size_t(r) * row;
        wrong +=
            !std::equal(got.begin() + int64_t(at), got.begin() + int64_t(at + width), source.begin() + int64_t(at));
      }
      return wrong;
    };
    const int64_t rows = others(data_.o, alone, results, no_results_),
                  logsumexps = others(data_.lse, lse_alone, lse, no_lse_);
    t_.expect(rows == 0 && logsumexps == 0, "sequence %d alone: %d rows of results and %d logsumexps are others",
              int(b), int(rows), int(logsumexps));
  }

  bool lies_at_16_bytes(const Side& side, int64_t pack, int64_t word, int64_t dim) const {
    return side.shift * word % pack == 0 && (dim + side.gap) % pack == 0;
  }
  // As if all rows of keys, and of values, begin at multiples of 16 bytes.
  bool keys_and_values_aligned() const {
    using K = Element<typename Kv::Key>;
    using V = Element<typename Kv::Value>;
    const bool keys = lies_at_16_bytes(d_.key, elements_of_16_bytes<typename Kv::Key>, K::per_unit, c_.dim);
    if (d_.column >= 0) return keys && d_.column % elements_of_16_bytes<typename Kv::Key> == 0;
    return keys && lies_at_16_bytes(d_.value, elements_of_16_bytes<typename Kv::Value>, V::per_unit, c_.value_dim());
  }
  // Modes for tensor cores are for rows that also end there.
  bool refuses_mode() const {
    if (!F::decodes || d_.mode < int(k::DecodeMode::tensor) || d_.empty()) return false;
    return of_float || !keys_and_values_aligned() || c_.dim % elements_of_16_bytes<typename Kv::Key> != 0 ||
           c_.value_dim() % elements_of_16_bytes<typename Kv::Value> != 0;
  }
  Precision precision() const {
    const DType queries = dtype_of<TQ>::value, keys = stored<typename Kv::Key>, values = stored<typename Kv::Value>;
    constexpr bool scaled = !std::is_same<typename Kv::ValueScale, k::Nothing>::value;
    const Precision of_attention = Types{queries, keys, values, scaled}.precision();
    if (F::decodes) {
      const auto mode = static_cast<k::DecodeMode>(d_.mode);
      if (of_float || mode == k::DecodeMode::plain) return {};
      const bool many = mode == k::DecodeMode::automatic && d_.q_len * (c_.heads / c_.kv_heads) > 8;
      if (d_.column >= 0 && (many || mode == k::DecodeMode::tensor)) return of_attention;
      const DType own = Types::has_16_bits(queries) ? queries : DType::f16;
      return precision_of(mode, Types::has_16_bits(keys) ? keys : own, Types::has_16_bits(values) ? values : DType::f16,
                          of_attention.queries != 0);
    }
    if (d_.in_8_bits && keys_and_values_aligned() && c_.aligned && c_.dim <= 128 && c_.value_dim() <= 128 &&
        c_.dim % 16 == 0 && c_.value_dim() % 16 == 0) {
      // Sums of tensor cores keep fewer bits with these: 2^-12 of what is added would do for those of 128 columns.
      Precision p;
      p.queries = p.values = 0x1p-10, p.weights = DType::e4m3, p.tensor = true;
      return p;
    }
    return of_attention;
  }
  void check_results() {
    const auto value = [&](int64_t b, int64_t head, int64_t pos, int64_t x) {
      return d_.column >= 0 ? key_(b, head, pos, d_.column + x) : value_(b, head, pos, x);
    };
    check(
        t_, "wrong", data_, [&](int64_t row, int64_t x) { return double(queries_[size_t(row * data_.q.cols() + x)]); },
        key_, value, model_of(d_.score), precision(), d_.step);
  }

  Tally& t_;
  const DrawnAttention& d_;
  const AttentionCase& c_;
  const Placement where_;
  const Keys key_;
  const Values value_;
  AttentionData<TQ, TO, DeviceMemory> data_;
  const OnDevice<int32_t> lengths_, kv_offsets_, table_, offsets_;
  const std::vector<unsigned char> no_results_, no_lse_, given_;
  std::vector<float> queries_;
  std::unique_ptr<SpreadHeads<TQ, DeviceMemory>> query_heads_;
  std::unique_ptr<SpreadHeads<TO, DeviceMemory>> result_heads_;
  const Stream stream_;
};

// ---- many calls, several at the same time ---------------------------------------------------------------------------

struct RandomFamily {
  Kinds kinds;
  void (*make)(Tally&, const DrawnAttention&);
};
template <int kDim, ViewKind kView, class TQ, class TO, class Kv, class Score, unsigned kFlags = 0>
RandomFamily family(const char* name) {
  using F = Family<kDim, kView, TQ, TO, Kv, Score, kFlags>;
  return {kinds_of<F>(name), [](Tally& t, const DrawnAttention& d) { RandomAttention<F>(t, d).run(); }};
}

inline void random_attention(const std::vector<RandomFamily>& families, int64_t usual) {
  std::vector<Kinds> kinds;
  for (const RandomFamily& one : families) kinds.push_back(one.kinds);
  const ScoreNumbersThere& numbers = score_numbers_there();
  std::atomic<int64_t> checked{0};
  each_random_call(
      usual, [&](uint64_t seed) { return draw(seed, kinds); },
      [&](const DrawnAttention& d) {
        Tally t;
        families[size_t(d.family)].make(t, d);
        checked += t.checked();
        return t.failed() == 0
                   ? std::string()
                   : std::to_string(t.failed()) + " failures of " + std::to_string(t.checked()) + ": " + t.first();
      },
      true);
  CHECK(checked > 0);
  CHECK(numbers.unchanged());
}

}  // namespace test
