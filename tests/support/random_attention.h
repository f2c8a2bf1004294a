// Random calls of attention() and decode(), of all that a caller may combine: draw() makes one from a seed, describe()
// tells it in one line. random_attention.cuh makes the calls.
#pragma once

#include "attention.h"
#include "heads.h"

namespace test {

// What the types of a call leave to be drawn. Sizes of types are elements in 16 bytes.
enum class ViewKind { dense, ragged, paged };
struct Kinds {
  const char* name;
  int64_t most_dim;  // of a head
  bool any_dim;      // attention<0>()
  ViewKind view;
  int64_t key_pack, value_pack;
  bool scaled_keys, scaled_values;
  bool of_float;      // keys or values
  bool in_place;      // queries and results have one type
  bool heads;         // queries and results may lie in any order
  bool workspace;     // attention() has one
  bool decodes;       // decode(), not attention()
  bool maps, ranges;  // the score has the parts of Maps, or of RangeMaps
  bool bias;          // it ends with a bias of its own
  bool no_mask;       // it is no_mask()
  bool latents;       // values may be columns of the keys
  bool in_8_bits;
};

// ---- what is drawn --------------------------------------------------------------------------------------------------

enum class Map { cap, alibi, bias, halved };
// Where a table of numbers is read: element first + b * batch + h * head + i * query + key, for head h of query i
// of sequence b.
struct TableAt {
  int64_t first = 0, batch = 0, head = 0, query = 0;
};
struct DrawnScore {
  int64_t left = -1, right = -1;
  bool top_left = false;
  std::vector<Map> maps;  // in this order
  float cap = 1;
  TableAt bias, bits, tree, last_bias;
  bool has_bits = false, has_tree = false, own_mask = false, has_sinks = false, has_last_bias = false;
  int64_t slopes = 0, sinks = 0;  // the first of them
  int64_t chunk = 0;              // keys of a chunk, for a range of one's own; 0: none
};

// Elements of memory before the first, and columns behind each head of a position.
struct Side {
  int64_t shift, gap;
};

enum class Refused { no, small_workspace, odd_workspace, large_head, odd_dim, splits, many_queries, mode, in_place };
// What the reason of such a refusal says.
inline const char* text_of(Refused why) {
  static const char* const texts[] = {"",
                                      "the workspace has",
                                      "not at a multiple of 16 bytes",
                                      "larger than",
                                      "dim is",
                                      "splits is",
                                      "q_len exceeds 32",
                                      "tensor cores take",
                                      "out overlaps q"};
  return texts[int(why)];
}

struct DrawnAttention {
  uint64_t seed = 0;
  int family = 0;
  const char* name = "";
  AttentionCase c{{}, {}, 1, 1, 8};
  Layout layout = Layout::nhd;
  int64_t page = 16;
  Side key{0, 0}, value{0, 0};
  ScaleOf grain = ScaleOf::head;
  int64_t column = -1;  // of the keys, where values begin, for latents
  DrawnScore score;
  double query_spread = 1, key_spread = 1;
  bool in_place = false;
  int query_order = -1, result_order = -1;  // of head_strides(); -1: heads side by side
  int64_t q_len = 0, tokens = 0;            // as the call is told
  bool told_length = false;                 // all sequences have one, which the host knows
  bool told_extent = false;                 // nhd() and hnd(), not strided()
  bool set_splits = false;
  bool in_8_bits = false, programmatic = false, constant_weights = false;
  int64_t new_keys = -1;
  int mode = 0;             // of decode(): automatic, plain, tensor, precise
  int multiprocessors = 0;  // as the call is told; 0: as many as there are
  bool largest_workspace = false;
  int64_t spare_bytes = 0;  // of a workspace, beyond what is needed
  bool again_without_lse = false, again_in_graph = false;
  std::vector<int64_t> alone;  // sequences that are attended to by themselves as well
  int64_t step = 1;            // of the results that are checked
  Refused refused = Refused::no;

  int64_t batch() const { return int64_t(c.q_lens.size()); }
  int64_t rows() const { return std::accumulate(c.q_lens.begin(), c.q_lens.end(), int64_t(0)); }
  bool empty() const { return c.q_lens.empty() || q_len == 0; }
  std::string describe() const;
};

inline std::string DrawnAttention::describe() const {
  std::ostringstream out;
  out << name << ", batch " << batch() << (c.ragged_q ? " ragged, " : ", ");
  const std::string shape = c.describe();
  out << shape.substr(0, shape.rfind(',')) << ", layout " << int(layout);  // without the threads of the CPU
  if (layout == Layout::paged_nhd || layout == Layout::paged_hnd) out << " of " << page;
  out << ", keys at " << key.shift << " + " << key.gap << ", values at " << value.shift << " + " << value.gap;
  if (column >= 0) out << ", latents from " << column;
  if (!c.aligned) out << ", odd rows";
  if (in_place) out << ", in place";
  if (query_order >= 0) out << ", queries in order " << query_order;
  if (result_order >= 0) out << ", results in order " << result_order;
  out << ", window " << score.left << " " << score.right << (score.top_left ? " top left" : "");
  static const char* const maps[] = {"cap", "alibi", "bias", "halved"};
  for (const Map m : score.maps) out << " & " << maps[int(m)];
  if (score.has_bits) out << " & bits";
  if (score.has_tree) out << " & tree";
  if (score.own_mask) out << " & own";
  if (score.has_sinks) out << " & sinks";
  if (score.chunk > 0) out << " & chunks of " << score.chunk;
  if (score.has_last_bias) out << " & bias " << score.last_bias.query;
  if (c.scale != 0) out << ", scale " << c.scale;
  if (query_spread != 1 || key_spread != 1) out << ", spread " << query_spread << " " << key_spread;
  out << ", q_len " << q_len;
  if (tokens) out << ", tokens " << tokens;
  if (told_length) out << ", one length";
  if (told_extent) out << ", nhd/hnd";
  if (set_splits) out << ", splits " << c.splits;
  if (c.most_keys) out << ", most_keys " << c.most_keys;
  if (new_keys >= 0) out << ", new_keys " << new_keys;
  if (mode) out << ", mode " << mode;
  if (in_8_bits) out << ", in 8 bits";
  if (programmatic) out << (constant_weights ? ", programmatic, constant weights" : ", programmatic");
  if (multiprocessors) out << ", " << multiprocessors << " multiprocessors";
  if (refused != Refused::no) out << ", to be refused: " << text_of(refused);
  return out.str();
}

// ---- drawing --------------------------------------------------------------------------------------------------------

class Drawer {
 public:
  Drawer(uint64_t seed, const std::vector<Kinds>& families) : r_(mix(seed) ^ 0x6472617765640000ull) {
    d_.seed = seed;
    d_.family = int(r_.below(int64_t(families.size())));
    k_ = families[size_t(d_.family)];
    d_.name = k_.name;
  }
  DrawnAttention draw() {
    lengths();
    heads();
    fit();
    memory();
    score();
    options();
    checks();
    refusals();
    return d_;
  }

 private:
  // A length up to `most`: few, next to the edge of a tile, or any.
  int64_t length(int64_t most) {
    switch (r_.below(4)) {
      case 0:
        return std::min(most, r_.below(9));
      case 1: {
        const int64_t edge = r_.any_of<int64_t>({16, 32, 64, 80, 96, 128, 192, 256, 384, 512, 640, 1024, 2048});
        return std::min(most, edge + r_.below(3) - 1);
      }
      case 2:
        return r_.below(std::min<int64_t>(most, 300) + 1);
      default:
        return r_.below(most + 1);
    }
  }

  void lengths() {
    AttentionCase& c = d_.c;
    int64_t batch = r_.below(13), most_q = 200, most_kv = 600;
    switch (r_.below(10)) {
      case 0:
        batch = 60 + r_.below(31), most_q = 3, most_kv = 40;
        break;
      case 1:
        batch = 1 + r_.below(2), most_q = 64, most_kv = 10000;
        break;
      case 2:
      case 3:
        batch = 1 + r_.below(3), most_q = 700, most_kv = 1500;
        break;
      case 4:
        batch = 1 + r_.below(4), most_q = 130, most_kv = 3000;
        break;
      default:
        break;
    }
    if (k_.decodes) most_q = std::min<int64_t>(most_q, r_.any_of<int64_t>({1, 1, 1, 2, 4, 8, 9, 17, 32}));
    c.ragged_q = r_.chance(k_.decodes ? 33 : 50);
    const bool even = r_.chance(25);
    const int64_t q = r_.chance(5) ? 0 : k_.decodes ? most_q : std::max<int64_t>(1, length(most_q));
    for (int64_t b = 0; b < batch; ++b) {
      c.q_lens.push_back(c.ragged_q ? length(most_q) : q);
      const int64_t mine = c.q_lens.back(), relation = r_.below(5);
      const int64_t kv = even && b > 0                ? c.kv_lens[0]
                         : relation == 0              ? mine
                         : relation == 1              ? r_.below(mine + 1)
                         : most_kv == 10000 && b == 0 ? 9000 + r_.below(1001)
                                                      : length(most_kv);
      c.kv_lens.push_back(kv);
    }
    d_.told_length = even && batch > 0 && k_.view != ViewKind::ragged && r_.chance(50);
  }

  void heads() {
    AttentionCase& c = d_.c;
    c.kv_heads = r_.any_of<int64_t>({1, 1, 2, 2, 3, 4, 8});
    c.heads = c.kv_heads * r_.any_of<int64_t>({1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 12, 16, 17});
    const int64_t most = k_.most_dim, ordinary = std::min<int64_t>(most, 256);
    const auto any = [&] { return 8 * (1 + r_.below(ordinary / 8)); };
    switch (r_.below(4)) {
      case 0:  // what kernels are made for
        c.dim = most < 64    ? most
                : most < 128 ? 64
                : most < 256 ? r_.any_of<int64_t>({64, 128})
                             : r_.any_of<int64_t>({64, 128, 256});
        break;
      case 1:
        c.dim = any();
        break;
      case 2:
        c.dim = any(), c.v_dim = any();
        break;
      default:
        if (most >= 576 && r_.chance(50)) {
          c.dim = r_.any_of<int64_t>({576, 576, 512, any()}), c.v_dim = r_.any_of<int64_t>({512, 512, any()});
        } else if (most >= 192) {
          c.dim = 192, c.v_dim = 128;
        } else {
          c.dim = 64;
        }
    }
    if (k_.latents && (!k_.any_dim || r_.chance(25))) {
      d_.column = r_.any_of<int64_t>({0, 0, 64, 64, 8});
      c.dim = 576, c.v_dim = 512;
      if (r_.chance(50)) c.kv_heads = 1, c.heads = r_.any_of<int64_t>({1, 7, 16, 64, 128});
    }
  }

  // Fewer of everything, until memory and oracle take as long as a test may.
  void fit() {
    AttentionCase& c = d_.c;
    const auto too_much = [&] {
      const int64_t keys = std::accumulate(c.kv_lens.begin(), c.kv_lens.end(), int64_t(0)), v_dim = c.value_dim();
      const int64_t most = c.kv_lens.empty() ? 0 : *std::max_element(c.kv_lens.begin(), c.kv_lens.end());
      return d_.rows() * c.heads * std::max(c.dim, v_dim) > 1500000 || keys * c.kv_heads * (c.dim + v_dim) > 3000000 ||
             (most + 5) * d_.batch() * c.kv_heads * std::max(c.dim, v_dim) > 6000000 ||
             keys * c.heads * (c.dim + v_dim) > 20000000;
    };
    while (too_much()) {
      switch (r_.below(3)) {
        case 0:
          c.heads /= c.kv_heads, c.kv_heads = (c.kv_heads + 1) / 2, c.heads *= c.kv_heads;
          break;
        case 1:
          c.heads = (c.heads / c.kv_heads + 1) / 2 * c.kv_heads;
          break;
        default: {
          // Those of one length stay so.
          for (int64_t& n : c.q_lens) n = n > 16 ? n * 3 / 4 : n;
          for (int64_t& n : c.kv_lens) n = n > 16 ? n * 3 / 4 : n;
        }
      }
    }
    const int64_t most = c.q_lens.empty() ? 5 : c.most_queries();
    d_.q_len = most;
    // Without any rows, queries and results may be so near each other that a row of either would reach the other.
    if (c.ragged_q && d_.rows() > 0 && r_.chance(33)) d_.q_len += r_.below(40);
    if (k_.decodes) d_.q_len = std::min<int64_t>(d_.q_len, 32);
    if (c.ragged_q && r_.chance(50)) d_.tokens = std::max<int64_t>(1, d_.rows()) + (r_.chance(50) ? 0 : r_.below(100));
  }

  Side side(int64_t dim, int64_t pack) {
    const int64_t word = pack == 32 ? 8 : 1;
    int64_t unit = pack;
    if (r_.chance(33))
      while (unit > word && r_.chance(50)) unit /= 2;
    if (r_.chance(20)) unit = word;
    return {unit * r_.below(3) / word, (unit - dim % unit) % unit + unit * r_.below(3)};
  }
  void memory() {
    AttentionCase& c = d_.c;
    const bool head_first = r_.chance(50);
    d_.layout = k_.view == ViewKind::ragged  ? Layout::ragged
                : k_.view == ViewKind::dense ? (head_first ? Layout::hnd : Layout::nhd)
                                             : (head_first ? Layout::paged_hnd : Layout::paged_nhd);
    d_.page = r_.any_of<int64_t>({1, 7, 16, 16, 64, 64, 128, 24});
    d_.key = side(c.dim, k_.key_pack), d_.value = side(c.value_dim(), k_.value_pack);
    d_.told_extent = !k_.scaled_keys && !k_.scaled_values && d_.column < 0 && r_.chance(33);
    if (d_.told_extent) d_.key.gap = d_.value.gap = 0;
    d_.grain = r_.any_of({ScaleOf::tensor, ScaleOf::head, ScaleOf::token});
    c.aligned = !r_.chance(25);
    const bool may_be_in_place =
        k_.in_place && c.dim == c.value_dim() && c.dim <= (k_.of_float ? 128 : 256) && d_.rows() > 0;
    d_.in_place = may_be_in_place && r_.chance(25);
    // A single row of a ragged batch, of which the host knows no number, has room for no second one in some orders.
    if (k_.heads && d_.rows() > int64_t(c.ragged_q) && !d_.in_place) {
      if (r_.chance(50)) d_.query_order = int(r_.below(6));
      if (r_.chance(50)) d_.result_order = int(r_.below(6));
    }
  }

  TableAt place(int64_t batch, int64_t head, int64_t query) {
    return {r_.below(8), r_.chance(33) ? 0 : batch, r_.chance(33) ? 0 : head, r_.chance(33) ? 0 : query};
  }
  TableAt bias() {
    const int64_t batch = 976 + r_.below(2), head = 130 + r_.below(2), query = 7 + r_.below(2);
    return place(batch, head, query);
  }
  void score() {
    DrawnScore& s = d_.score;
    if (k_.no_mask) return;
    s.top_left = r_.chance(25);
    switch (r_.below(5)) {
      case 0:
        break;
      case 1:
        s.left = r_.chance(33) ? -1 : length(1000), s.right = r_.chance(33) ? -1 : length(300);
        break;
      case 2:
        s.left = length(1000), s.right = 0;
        break;
      default:
        s.right = 0;
    }
    if (k_.maps) {
      for (const Map m : {Map::cap, Map::alibi, Map::bias, Map::halved}) {
        if (r_.chance(25)) s.maps.insert(s.maps.begin() + r_.below(int64_t(s.maps.size()) + 1), m);
      }
      s.cap = float(r_.any_of({0.5, 2.0, 20.0, 50.0}));
      s.bias = bias();
      s.bits = place(613, 37, 5), s.tree = place(401, 0, 3);
      s.has_bits = r_.chance(20), s.has_tree = r_.chance(17), s.own_mask = r_.chance(17), s.has_sinks = r_.chance(25);
      s.slopes = r_.below(64), s.sinks = r_.below(64);
      if (k_.ranges && r_.chance(50)) s.chunk = r_.any_of<int64_t>({1, 16, 37, 128, 500});
    }
    s.has_last_bias = k_.bias && r_.chance(50);
    s.last_bias = bias();
  }

  void options() {
    AttentionCase& c = d_.c;
    if (r_.chance(33)) c.scale = r_.any_of({0.05, 0.3, -0.2, 1.0, 1e-5});
    if (r_.chance(25)) d_.query_spread = r_.any_of({4.0, 12.0, 150.0});
    if (r_.chance(12)) d_.key_spread = r_.any_of({0.1, 4.0, 12.0});
    const int64_t most = c.kv_lens.empty() ? 0 : *std::max_element(c.kv_lens.begin(), c.kv_lens.end());
    // Thousands of weights that are all nearly 1 round to 1 as they are added: the oracle takes errors to differ.
    if (c.scale == 1e-5 && most > 1000) c.scale = 0.05;
    if (r_.chance(33)) {
      c.most_keys = r_.any_of<int64_t>({most, most + r_.below(1000), 1 + r_.below(most + 1), 100000});
    }
    if (r_.chance(25)) {
      d_.set_splits = true, c.splits = r_.any_of({1, 2, 3, 5, 16, 17, 256});
      // As much workspace as is quickly made.
      while (c.splits > 1 && d_.q_len * d_.batch() * c.heads * c.splits * c.value_dim() > 30000000) c.splits /= 2;
    }
    d_.in_8_bits = k_.in_8_bits && r_.chance(50);
    d_.programmatic = r_.chance(20), d_.constant_weights = d_.programmatic && r_.chance(50);
    if (k_.decodes && r_.chance(d_.programmatic ? 50 : 12)) d_.new_keys = r_.below(most + 2);
    if (k_.decodes && r_.chance(50)) d_.mode = int(r_.below(4));
    if (r_.chance(25)) d_.multiprocessors = r_.any_of({1, 2, 3, 5, 8, 20, 60});
    d_.largest_workspace = r_.chance(12);
    d_.spare_bytes = r_.chance(25) ? r_.below(1000) : 0;
  }

  void checks() {
    const AttentionCase& c = d_.c;
    d_.again_without_lse = r_.chance(50), d_.again_in_graph = r_.chance(33);
    for (int i = 0; i < 2 && d_.batch() > 0 && r_.chance(50); ++i) d_.alone.push_back(r_.below(d_.batch()));
    int64_t work = 0;
    for (size_t b = 0; b < c.q_lens.size(); ++b)
      work += c.q_lens[b] * c.heads * (c.kv_lens[b] + 8) * (c.dim + c.value_dim());
    d_.step = 1 + work / 15000000;
    while (std::gcd(d_.step, c.heads) > 1) ++d_.step;
  }

  void refusals() {
    if (d_.empty() || d_.told_extent || !r_.chance(5)) return;
    AttentionCase& c = d_.c;
    const bool workspace = k_.workspace || k_.decodes;
    const Refused why = r_.any_of({Refused::small_workspace, Refused::odd_workspace, Refused::large_head,
                                   Refused::odd_dim, Refused::splits, Refused::many_queries, Refused::in_place});
    if (!workspace && (why == Refused::small_workspace || why == Refused::odd_workspace)) return;
    if (why == Refused::many_queries) {
      if (!k_.decodes) return;
      d_.q_len = 33;
    }
    if (why == Refused::large_head) {
      if (k_.any_dim || k_.most_dim >= 256) return;
      c.dim = k_.most_dim + 8;
    }
    if (why == Refused::odd_dim) c.dim = r_.any_of<int64_t>({264, 520, k_.key_pack == 32 ? 568 : 12});
    if (why == Refused::splits) c.splits = r_.any_of({257, -1, 1000}), d_.set_splits = true;
    if (why == Refused::in_place) {
      // Results of another width, or of heads that are too large.
      if (!k_.in_place || d_.rows() == 0 || c.value_dim() > c.dim) return;
      if (c.dim == c.value_dim() && c.dim <= (k_.of_float ? 128 : 256)) return;
      d_.query_order = d_.result_order = -1;
    }
    d_.in_place = why == Refused::in_place;
    d_.largest_workspace = false, d_.spare_bytes = 0;  // or else one byte less would do
    d_.refused = why;
  }

  Random r_;
  Kinds k_;
  DrawnAttention d_;
};

inline DrawnAttention draw(uint64_t seed, const std::vector<Kinds>& families) { return Drawer(seed, families).draw(); }

// ---- tables, which all scores share ---------------------------------------------------------------------------------

// As many as the strides of Drawer and 10,000 keys reach.
struct ScoreNumbers {
  std::vector<k::half> biases = std::vector<k::half>(1 << 18), zeros = std::vector<k::half>(1 << 14);
  std::vector<uint32_t> bits = std::vector<uint32_t>(1 << 17);
  std::vector<float> slopes = std::vector<float>(256), sinks = std::vector<float>(256);

  ScoreNumbers() {
    Random random(77);
    for (auto& x : biases) x = make<k::half>(random.below(9) == 0 ? kMinusInfinity : 2 * random.normal());
    for (auto& x : zeros) x = make<k::half>(0);
    for (auto& x : bits) {
      const int64_t kind = random.below(8);
      x = kind == 0 ? 0 : kind == 1 ? ~uint32_t(0) : uint32_t(random.bits());
    }
    for (auto& x : slopes) {
      const double size = std::ldexp(1.0, -int(random.below(9)));
      x = float(random.below(4) == 0 ? -0.1 * size : size);
    }
    for (auto& x : sinks)
      x = random.below(5) == 0 ? -std::numeric_limits<float>::infinity() : float(3 * random.normal());
  }
};
inline const ScoreNumbers& score_numbers() {
  static const ScoreNumbers all;
  return all;
}
inline int64_t index_in(const TableAt& at, const Spot& s) {
  return at.first + s.b * at.batch + s.head * at.head + s.query * at.query;
}

// What a drawn score should do.
inline ScoreModel model_of(const DrawnScore& s) {
  const auto bias = [&](const TableAt& at) {
    ScoreModel m;
    m.transform = [=](Real<> x, const Spot& spot) {
      const double b = value_of(score_numbers().biases[size_t(index_in(at, spot) + spot.key)]);
      return x.v == kMinusInfinity || b == kMinusInfinity ? Real<>(kMinusInfinity) : x + Real<>(b);
    };
    return m;
  };
  const auto bits = [](const TableAt& at, bool last_keys) {
    ScoreModel m;
    m.visible = [=](const Spot& spot) {
      const int64_t bit = last_keys ? spot.key - (spot.kv_len - spot.q_len) : spot.key;
      return bit < 0 || (score_numbers().bits[size_t(index_in(at, spot) + bit / 32)] >> (bit % 32) & 1) != 0;
    };
    return m;
  };
  ScoreModel all = window_model(s.left, s.right, s.top_left);
  for (const Map map : s.maps) {
    ScoreModel m;
    switch (map) {
      case Map::cap:
        m = soft_cap_model(s.cap);
        break;
      case Map::alibi: {
        const auto from = score_numbers().slopes.begin() + s.slopes;
        m = alibi_model(std::vector<float>(from, from + 160));
        break;
      }
      case Map::bias:
        m = bias(s.bias);
        break;
      case Map::halved:
        m.transform = [](Real<> x, const Spot&) { return Real<>(x.v * 0.5, x.e * 0.5); };
    }
    all = all & m;
  }
  if (s.has_bits) all = all & bits(s.bits, false);
  if (s.has_tree) all = all & bits(s.tree, true);
  if (s.own_mask) {
    ScoreModel m;
    m.visible = [](const Spot& at) { return at.head % 2 == 0 || at.key % 3 != 0; };
    all = all & m;
  }
  if (s.chunk > 0) {
    ScoreModel m;
    m.visible = [chunk = s.chunk](const Spot& at) {
      const int64_t place = std::max<int64_t>(0, at.query + at.kv_len - at.q_len);
      return at.key / chunk >= place / chunk - 1 && at.key / chunk <= place / chunk;
    };
    all = all & m;
  }
  if (s.has_sinks) {
    ScoreModel m;
    m.sink = [first = s.sinks](int64_t head) { return double(score_numbers().sinks[size_t(first + head)]); };
    all = all & m;
  }
  return s.has_last_bias ? all & bias(s.last_bias) : all;
}

}  // namespace test
