// Random calls of matmul() (random_calls.cuh): what goes in, what stands behind the product, and how it is to run, each
// combined with the others. Types are given; everything else is drawn.
#pragma once

#include "gpu_products.cuh"
#include "random_matrices.cuh"
#include "rope.h"

namespace test {

// ---- what is drawn --------------------------------------------------------------------------------------------------

// What types of operands allow.
struct Operands {
  const char* name;
  bool groups = true;      // Groups go with them
  bool floats = false;     // CUDA cores alone multiply such weights
  bool by_token = false;   // each token has its own weights
  bool eight_bit = false;  // both operands are codes of 8 bits
  int parts = 1;           // stacked matrices
  bool rope = false;       // turns queries and keys
  int top_k = 1;
};

struct DrawnProduct {
  Operands kind;
  uint64_t seed = 0;
  int64_t m = 0, n = 0, k = 0, rows = 0;  // rows: of inputs and results
  int64_t all_rows = 0;                   // before some are taken for a smaller batch
  int64_t count = 1;
  std::vector<int32_t> offsets;  // none: groups of one size
  std::vector<int64_t> parts;
  int head_dim = 0, rotary = 0;
  Place x, w[3], scales[3], y[3], residual;
  bool one_row = false, elsewhere = false, bias = false, slow_inputs = false, graph = false;
  bool programmatic = false, constant = false;
  int activation = 0;
  Grain grain[2] = {Grain::row, Grain::row};
  int64_t group[2] = {32, 32};
  k::MatmulPolicy policy;
  Room room = Room::none;
  int sms = 0, gbs = -1;  // 0 and -1: those of the device

  bool several() const { return count != 1 || !offsets.empty(); }
  // Columns of a group of scales.
  int64_t group_size(int part) const { return group[part == 1 ? 1 : 0]; }
  // The group of a row, or -1.
  int64_t group_of(int64_t row) const {
    if (offsets.empty()) return row / m;
    for (int64_t g = 0; g < count; ++g)
      if (row >= offsets[size_t(g)] && row < offsets[size_t(g + 1)]) return g;
    return -1;
  }
  std::string describe() const {
    std::ostringstream out;
    out << kind.name << " " << m << " x " << n << " x " << k;
    if (several()) out << ", " << count << " groups";
    if (!offsets.empty()) {
      out << " to";
      for (const int32_t at : offsets) out << " " << at;
    }
    for (size_t i = 0; parts.size() > 1 && i < parts.size(); ++i) out << ", part " << parts[i];
    if (kind.rope) out << ", heads " << head_dim << "/" << rotary;
    out << ", x " << x.kind << "/" << x.more << (one_row ? " one row" : "") << ", w " << w[0].kind << "/" << w[0].more
        << " " << w[1].kind << "/" << w[1].more << ", y " << y[0].kind << "/" << y[0].more << ", scales "
        << int(grain[0]) << ":" << group[0] << " " << int(grain[1]) << ":" << group[1] << ", "
        << k::to_string(policy.path);
    if (policy.tile_tokens || policy.tile_rows || policy.tiles_at_once)
      out << " tile " << policy.tile_tokens << " x " << policy.tile_rows << " at once " << policy.tiles_at_once;
    if (policy.batch_invariant) out << " batch_invariant";
    if (policy.fast_sums) out << " fast_sums";
    if (policy.weights_ready) out << " weights_ready";
    if (programmatic) out << " programmatic";
    if (constant) out << " constant_weights";
    if (slow_inputs) out << " slow_inputs";
    if (graph) out << " graph";
    out << ", " << name_of(room);
    if (sms > 0) out << ", " << sms << " multiprocessors";
    if (gbs >= 0) out << ", " << gbs << " GB/s";
    out << ", activation " << activation << (bias ? ", bias" : "") << (elsewhere ? ", residual elsewhere" : "");
    return out.str();
  }
};

// Sizes around what tiles, packs and steps hold, and any.
inline int64_t draw_tokens(Random& random) {
  const int64_t what = random.below(100);
  if (what < 2) return 0;
  if (what < 42) return 1 + random.below(16);
  if (what >= 78) return 1 + random.below(600);
  const int tile = random.any_of({32, 64, 96, 128, 160, 192, 256, 320, 384});
  return tile + random.below(3) - 1;
}
inline int64_t draw_outputs(Random& random) {
  const int64_t what = random.below(100);
  if (what < 1) return 0;
  if (what < 15) return 1 + random.below(20);
  if (what < 40) return 8 * (1 + random.below(100));
  if (what >= 65) return 1 + random.below(what < 85 ? 700 : 3000);
  const int64_t tiles = 1 + random.below(20);
  return 64 * tiles + random.below(3) - 1;
}
inline int64_t draw_columns(Random& random) {
  const int64_t what = random.below(100);
  if (what < 2) return 0;
  if (what < 10) return 1 + random.below(40);
  if (what < 25) return 1 + random.below(2000);
  const int64_t unit = what < 50 ? random.any_of({8, 16, 32, 64, 128}) : random.any_of({16, 32, 64, 128});
  if (what < 80) return unit * (1 + random.below(what < 50 ? 12 : 40));
  const int64_t steps = 1 + random.below(80);
  return 64 * steps + random.any_of({-8, -1, 0, 1, 8, 16, 32});
}
inline DrawnProduct draw_product(const Operands& kind, uint64_t seed) {
  Random random(seed * 1000003 + 17);
  DrawnProduct d;
  d.kind = kind, d.seed = seed;
  do {
    d.m = draw_tokens(random), d.n = draw_outputs(random), d.k = draw_columns(random);
  } while (d.n * d.k > 3000000 || d.m * d.k > 1500000 || d.m * d.n > 600000);
  if (kind.by_token && d.m > 60) d.m = 1 + d.m % 60;
  for (int i = 0; i < kind.parts; ++i) {
    d.parts.push_back(kind.parts == 1 ? d.n : random.chance(15) ? 0 : 1 + random.below(d.n + 1));
    if (kind.parts > 1 && random.chance(50)) d.parts.back() = (d.parts.back() + 127) / 128 * 128;
  }
  if (kind.rope) {
    d.head_dim = random.any_of({8, 16, 32, 48, 64, 64, 128, 128, 256});
    d.rotary = random.chance(70) ? d.head_dim : int(2 * random.below(d.head_dim / 2 + 1));
    for (int i = 0; i < 3; ++i) d.parts[size_t(i)] = d.head_dim * (i < 2 ? 1 + random.below(512 / d.head_dim) : 1);
  }
  if (kind.parts > 1) d.n = d.parts[0] + d.parts[1] + d.parts[2];

  d.rows = d.m;
  if (kind.groups && random.chance(30) && d.m > 0) {
    d.count = random.chance(10) ? 1 : 1 + random.below(random.chance(15) ? 40 : 7);
    while (d.count > 1 && d.count * d.n * d.k > 4000000) --d.count;
    if (random.chance(70)) {
      // Some groups are empty, and some rows may belong to none.
      std::vector<int32_t> ends;
      const int64_t used = random.chance(30) ? random.below(d.m + 1) : d.m;
      for (int64_t g = 1; g < d.count; ++g)
        ends.push_back(random.chance(20) && !ends.empty() ? ends.back() : int32_t(random.below(used + 1)));
      std::sort(ends.begin(), ends.end());
      d.offsets = {0};
      d.offsets.insert(d.offsets.end(), ends.begin(), ends.end());
      d.offsets.push_back(int32_t(used));
    } else {
      d.m = 1 + (d.m - 1) / d.count;
      d.rows = d.count * d.m;
    }
  }
  d.all_rows = d.rows;

  d.x = draw_place(random), d.residual = draw_place(random);
  for (int i = 0; i < 3; ++i) {
    d.w[i] = i > 0 && random.chance(70) ? d.w[0] : draw_place(random);
    d.y[i] = draw_place(random), d.scales[i] = draw_place(random);
  }
  d.one_row = random.chance(2);
  d.elsewhere = random.chance(30), d.bias = random.chance(70), d.activation = int(random.below(4));
  for (int i = 0; i < 2; ++i) {
    d.grain[i] = Grain(random.below(4));
    d.group[i] = random.any_of({8, 16, 16, 32, 32, 64, 64, 128, 128, 128, 256, 512, 4096});
    if (random.chance(4)) d.group[i] = random.any_of({1, 2, 4});
    if (kind.eight_bit && random.chance(70)) d.group[i] = std::max<int64_t>(128, d.group[i]);
  }
  if (random.chance(85)) d.group[1] = d.group[0];

  const int64_t path = random.below(100);
  if (path >= 45) {
    if (path < 85)
      d.policy.path = kind.floats ? Path::simt : Path::gemm;
    else
      d.policy.path = random.chance(50) ? Path::gemv : Path::skinny;
    if (path >= 60 && path < 85) {
      const TileSize tile = kTileSizes[random.below(int64_t(sizeof(kTileSizes) / sizeof(TileSize)))];
      d.policy.tile_tokens = random.chance(15) ? 0 : tile.tokens;
      d.policy.tile_rows = random.chance(15) ? 0 : tile.rows;
      d.policy.tiles_at_once = random.chance(50) ? tile.at_once : 0;
    }
  }
  d.policy.batch_invariant = random.chance(18);
  d.policy.fast_sums = random.chance(30);
  d.policy.weights_ready = random.chance(40);
  d.programmatic = random.chance(40), d.constant = random.chance(30);
  d.slow_inputs = random.chance(15);
  if (d.slow_inputs) d.programmatic = true;
  d.graph = random.chance(15);
  d.room = Room(random.below(4));
  if (random.chance(30)) d.sms = int(1 + random.below(random.chance(50) ? 8 : 160));
  if (random.chance(35)) d.gbs = random.any_of({0, 1, 1 << 20, 1 << 20, 1 << 20});
  return d;
}

// ---- inputs ---------------------------------------------------------------------------------------------------------
// Each has a source, and row(r), what its row r should be; unchanged(), whether memory holds what it was given.
// `rounded`: whether tensor cores round it to U.

template <class T, class U>
struct PlainX {
  static constexpr int rounded = std::is_same<T, U>::value || sizeof(T) == 1 ? 0 : 1;
  Cells<T> x;
  PlainX(const DrawnProduct& d, int64_t first)
      : x(d.seed + 1, sizeof(T) == 1 ? Values::codes : Values::normal, d.rows, d.k, d.one_row ? 0 : d.x.ld<T>(d.k),
          d.x.shift<T>(), first) {}
  auto source() const { return k::load(x.at(), x.ld()); }
  bool unchanged() const { return x.unchanged(); }
  const Cells<T>& cells() const { return x; }
  Row<> row(int64_t r) const { return row_of(x, r); }
};

inline Row<> times(Row<> row, const Cells<float>& gamma) {
  for (size_t i = 0; i < row.size(); ++i) row[i] = row[i] * Real<>(gamma.value(0, int64_t(i)));
  return row;
}
// With a map, which has a number for each column.
template <class T>
struct MappedX : PlainX<T, void> {
  static constexpr int rounded = 1;
  Cells<float> gamma;
  MappedX(const DrawnProduct& d, int64_t first)
      : PlainX<T, void>(d, first), gamma(d.seed + 2, Values::normal, 1, d.k, d.k) {}
  auto source() const { return PlainX<T, void>::source() | k::mul(gamma.at()); }
  bool unchanged() const { return PlainX<T, void>::unchanged() && gamma.unchanged(); }
  Row<> row(int64_t r) const { return times(PlainX<T, void>::row(r), gamma); }
};

template <class X, class Norm>
struct NormedX : X {
  static constexpr int rounded = 1;
  Cells<float> gamma;
  NormedX(const DrawnProduct& d, int64_t first) : X(d, first), gamma(d.seed + 2, Values::normal, 1, d.k, d.k) {}
  auto source() const { return k::normed(X::source(), Norm{}.options()) | k::affine(gamma.at()); }
  bool unchanged() const { return X::unchanged() && gamma.unchanged(); }
  Row<> row(int64_t r) const {
    Row<> out = X::row(r);
    if (!out.empty()) Norm{}.expect(out);
    return times(out, gamma);
  }
};

// In an order of slots, top_k for each row; -1 stands for row 0.
template <class T, class U>
struct GatheredX {
  static constexpr int rounded = PlainX<T, U>::rounded;
  int64_t top_k;
  Cells<T> x;
  Cells<int32_t> order;
  GatheredX(const DrawnProduct& d, int64_t first)
      : top_k(top_k_of(d)),
        x(d.seed + 1, Values::normal, rows(d), d.k, d.one_row ? 0 : d.x.ld<T>(d.k), d.x.shift<T>()),
        order([&](int64_t, int64_t c) { return slot(d, c + first); }, 1, d.rows, d.rows, 0, 0) {}
  static int64_t top_k_of(const DrawnProduct& d) { return 1 + int64_t(d.seed % 3); }
  static int64_t rows(const DrawnProduct& d) { return d.all_rows / top_k_of(d) + 1; }
  static int32_t slot(const DrawnProduct& d, int64_t r) {
    const uint64_t bits = cell_bits(d.seed + 3, r, 0);
    if (bits % 50 == 0) return -1;
    return int32_t(bits / 64 % uint64_t(rows(d) * top_k_of(d)));
  }
  auto source() const { return k::gathered(k::load(x.at(), x.ld()), order.at(), top_k); }
  bool unchanged() const { return x.unchanged() && order.unchanged(); }
  const Cells<T>& cells() const { return x; }
  Row<> row(int64_t r) const { return row_of(x, std::max<int64_t>(0, order.get(0, r)) / top_k); }
};

// Each row several times.
template <class T, class U>
struct RepeatedX {
  static constexpr int rounded = 0;  // weights of each token take the gemv path, which rounds nothing
  int64_t times;
  Cells<T> x;
  RepeatedX(const DrawnProduct& d, int64_t first)
      : times(d.kind.top_k),
        x(d.seed + 1, Values::normal, (d.rows + times - 1) / times, d.k, d.x.ld<T>(d.k), d.x.shift<T>(), first) {}
  auto source() const { return k::repeated(k::load(x.at(), x.ld()), times); }
  bool unchanged() const { return x.unchanged(); }
  const Cells<T>& cells() const { return x; }
  Row<> row(int64_t r) const { return row_of(x, r / times); }
};

// Codes of 8 bits with scales.
template <class T, class S>
struct CodesOf : ScaledBytes<Cells<T>, Cells<S>> {
  using Base = ScaledBytes<Cells<T>, Cells<S>>;
  CodesOf(uint64_t seed, int64_t rows, int64_t cols, Grain g, int64_t n, const Place& place, const Place& of_scales,
          int64_t first = 0)
      : Base{{seed, Values::codes, rows, cols, place.ld<T>(cols), place.shift<T>(), first},
             g,
             Base::size_of(g, n),
             {seed + 1, Values::scales,
              g == Grain::tensor  ? 1
              : g == Grain::block ? groups_of(rows, n)
                                  : rows,
              groups_of(cols, Base::size_of(g, n)), of_scales.ld<S>(groups_of(cols, Base::size_of(g, n))),
              of_scales.shift<S>(), g == Grain::tensor ? 0 : first}} {}
};
template <class T>
struct CodesX : CodesOf<T, float> {
  static constexpr int rounded = 1;
  CodesX(const DrawnProduct& d, int64_t first)
      : CodesOf<T, float>(d.seed + 1, d.rows, d.k, d.grain[1] == Grain::block ? Grain::group : d.grain[1], d.group[1],
                          d.x, d.scales[2], first) {}
  const Cells<T>& cells() const { return this->codes; }
  Row<> row(int64_t r) const {
    Row<> out(size_t(this->codes.cols()));
    for (size_t i = 0; i < out.size(); ++i) out[i] = Real<>((*this)(r, int64_t(i))).rounded();
    return out;
  }
};

// ---- weights --------------------------------------------------------------------------------------------------------
// One matrix, number `part` of its call: operator()(row, col). `rounded`: how often tensor cores round a weight.

template <class T>
struct PlainW : Cells<T> {
  static constexpr int rounded = 0;
  PlainW(const DrawnProduct& d, int part, int64_t rows)
      : Cells<T>(d.seed + 10 + uint64_t(part), sizeof(T) == 1 ? Values::codes : Values::normal, rows, d.k,
                 d.w[part].ld<T>(d.k), d.w[part].shift<T>()) {}
  auto source() const { return k::load(this->at(), this->ld()); }
  double operator()(int64_t row, int64_t col) const { return this->value(row, col); }
};
template <class T>
struct MappedW : PlainW<T> {
  static constexpr int rounded = 1;
  using PlainW<T>::PlainW;
  auto source() const { return PlainW<T>::source() | k::scale(0.75); }
  double operator()(int64_t row, int64_t col) const { return 0.75 * PlainW<T>::operator()(row, col); }
};
template <class T, class S>
struct ScaledW : CodesOf<T, S> {
  static constexpr int rounded = 2;
  ScaledW(const DrawnProduct& d, int part, int64_t rows)
      : CodesOf<T, S>(d.seed + 10 + 2 * uint64_t(part), rows, d.k, d.grain[0], d.group_size(part), d.w[part],
                      d.scales[part]) {}
};

// Words of eight codes. Any bits are codes.
inline Cells<uint32_t> words_of(const DrawnProduct& d, int part, int64_t rows) {
  const int64_t cols = groups_of(d.k, 8);
  return Cells<uint32_t>([&](int64_t r, int64_t c) { return uint32_t(cell_bits(d.seed + 20 + uint64_t(part), r, c)); },
                         rows, cols, d.w[part].ld<uint32_t>(cols), d.w[part].shift<uint32_t>(), 0);
}
template <class S, bool kZeros>
struct FourW : FourBitWords<kZeros, Cells<uint32_t>, Cells<S>, Cells<uint8_t>> {
  static constexpr int rounded = 2;
  FourW(const DrawnProduct& d, int part, int64_t rows)
      : FourW(d, part, rows, d.grain[0] == Grain::row ? kWholeRow : d.group_size(part), d.scales[part]) {}

 private:
  FourW(const DrawnProduct& d, int part, int64_t rows, int64_t size, const Place& place)
      : FourBitWords<kZeros, Cells<uint32_t>, Cells<S>, Cells<uint8_t>>{
            words_of(d, part, rows),
            size,
            {d.seed + 30 + uint64_t(part), Values::scales, rows, groups_of(d.k, size),
             place.ld<S>(groups_of(d.k, size)), place.shift<S>()},
            {[&](int64_t r, int64_t c) { return uint8_t(cell_bits(d.seed + 40 + uint64_t(part), r, c) % 16); }, rows,
             groups_of(d.k, size), place.ld<S>(groups_of(d.k, size)), place.shift<S>(), 0}} {}
};
// float4_e2m1 with powers of two as scales, as in MXFP4.
struct PowersW : FourBitFloatWords<k::float8_e8m0, Cells<uint32_t>, Cells<uint8_t>> {
  static constexpr int rounded = 2;
  PowersW(const DrawnProduct& d, int part, int64_t rows)
      : PowersW(d, part, rows, groups_of(d.k, d.group_size(part)), d.scales[part]) {}

 private:
  PowersW(const DrawnProduct& d, int part, int64_t rows, int64_t groups, const Place& place)
      : FourBitFloatWords<k::float8_e8m0, Cells<uint32_t>, Cells<uint8_t>>{
            words_of(d, part, rows),
            d.group_size(part),
            {[&](int64_t r, int64_t c) { return uint8_t(121 + cell_bits(d.seed + 30, r, c) % 9); }, rows, groups,
             place.ld<uint8_t>(groups), place.shift<uint8_t>(), 0}} {}
};

// The weights of a call: value(matrix, group, token, output, column).
template <class W>
struct Single {
  static constexpr int matrices = 1, rounded = W::rounded;
  const DrawnProduct& d;
  W w;
  explicit Single(const DrawnProduct& drawn, int64_t = 0) : d(drawn), w(d, 0, d.count * d.n) {}
  auto source() const { return w.source(); }
  bool unchanged() const { return w.unchanged(); }
  double value(int, int64_t group, int64_t, int64_t n, int64_t i) const { return w(group * d.n + n, i); }
};
template <class W>
struct Gates {
  static constexpr int matrices = 2, rounded = W::rounded;
  const DrawnProduct& d;
  W gate, up;
  explicit Gates(const DrawnProduct& drawn, int64_t = 0)
      : d(drawn), gate(d, 0, d.count * d.n), up(d, 1, d.count * d.n) {}
  auto source() const { return k::gated(gate.source(), up.source()); }
  bool unchanged() const { return gate.unchanged() && up.unchanged(); }
  double value(int matrix, int64_t group, int64_t, int64_t n, int64_t i) const {
    return matrix == 0 ? gate(group * d.n + n, i) : up(group * d.n + n, i);
  }
};
template <class W>
struct Stack {
  static constexpr int matrices = 1, rounded = W::rounded;
  const DrawnProduct& d;
  W a, b, c;
  explicit Stack(const DrawnProduct& drawn, int64_t = 0)
      : d(drawn), a(d, 0, d.parts[0]), b(d, 1, d.parts[1]), c(d, 2, d.parts[2]) {}
  auto source() const { return k::stacked(a.source(), d.parts[0], b.source(), d.parts[1], c.source(), d.parts[2]); }
  bool unchanged() const { return a.unchanged() && b.unchanged() && c.unchanged(); }
  double value(int, int64_t, int64_t, int64_t n, int64_t i) const {
    if (n < d.parts[0]) return a(n, i);
    n -= d.parts[0];
    return n < d.parts[1] ? b(n, i) : c(n - d.parts[1], i);
  }
};

// Rotary positions of a call.
struct Rotary {
  Turning turn;
  Numbers<float, DeviceMemory> frequencies;
  Numbers<int32_t, DeviceMemory> positions;
  Rotary(const DrawnProduct& d, int64_t first)
      : turn(d.head_dim, d.rotary, d.seed % 2 == 0, int(d.rows + first) + 1),
        frequencies(turn.frequencies),
        positions(std::vector<int32_t>(turn.positions.begin() + first, turn.positions.end())) {
    turn.positions.erase(turn.positions.begin(), turn.positions.begin() + first);
  }
  k::Rope map() const { return turn.map(positions.data(), frequencies.data()); }
  bool unchanged() const { return frequencies.unchanged() && positions.unchanged(); }
};
// Queries and keys in pairs, and values.
template <class W>
struct RopeWeights : Stack<W> {
  Rotary rotary;
  explicit RopeWeights(const DrawnProduct& d, int64_t first = 0) : Stack<W>(d), rotary(d, first) {}
  bool unchanged() const { return Stack<W>::unchanged() && rotary.unchanged(); }
  auto source() const {
    const auto& p = this->d.parts;
    return k::stacked(k::paired(this->a.source(), rotary.map()), p[0], k::paired(this->b.source(), rotary.map()), p[1],
                      k::plain(this->c.source()), p[2]);
  }
};

// Each token has its expert.
template <class W>
struct OfExperts {
  static constexpr int matrices = 1, rounded = W::rounded, experts = 5;
  const DrawnProduct& d;
  W w;
  Cells<int32_t> ids;
  explicit OfExperts(const DrawnProduct& drawn, int64_t first = 0)
      : d(drawn),
        w(d, 0, experts * d.n),
        ids([&](int64_t, int64_t c) { return int32_t(cell_bits(d.seed + 50, c + first, 0) % experts); }, 1, d.rows,
            d.rows, 0, 0) {}
  auto source() const { return k::experts(w.source(), ids.at(), d.n, experts); }
  bool unchanged() const { return w.unchanged() && ids.unchanged(); }
  double value(int, int64_t, int64_t token, int64_t n, int64_t i) const { return w(ids.get(0, token) * d.n + n, i); }
};

// ---- results --------------------------------------------------------------------------------------------------------
// sink(), and want(r, c, sum), where sum(matrix, column) are the sums of row r. What a sink reads is an input.

template <class T>
struct Results {
  const DrawnProduct& d;
  std::vector<std::unique_ptr<Device<T>>> y;
  std::vector<int64_t> begins;
  Results(const DrawnProduct& drawn, int parts) : d(drawn) {
    for (int64_t i = 0, begin = 0; i < parts; begin += d.parts[size_t(i)], ++i) {
      const int64_t cols = parts == 1 ? d.n : d.parts[size_t(i)];
      const Place& place = d.y[i];
      y.push_back(std::make_unique<Device<T>>(d.rows, cols, place.ld<T>(cols), place.shift<T>()));
      begins.push_back(begin);
    }
  }
  T* data(int i = 0) const { return y[size_t(i)]->data(); }
  int64_t ld(int i = 0) const { return y[size_t(i)]->ld(); }
  T get(int64_t r, int64_t c) const {
    size_t i = 0;
    while (i + 1 < y.size() && c >= begins[i + 1]) ++i;
    return y[i]->get(r, c - begins[i]);
  }
  bool inputs_unchanged() const { return true; }
};

template <class T>
struct StoreOnly : Results<T> {
  explicit StoreOnly(const DrawnProduct& d, int64_t = 0) : Results<T>(d, 1) {}
  auto sink() const { return k::store(this->data(), this->ld()); }
  template <class Sum>
  Real<> want(int64_t, int64_t c, const Sum& sum) const {
    return sum(0, c);
  }
};

template <class T>
struct Biased : Results<T> {
  Cells<float> bias;
  explicit Biased(const DrawnProduct& d, int64_t = 0) : Results<T>(d, 1), bias(bias_of(d, 0)) {}
  static Cells<float> bias_of(const DrawnProduct& d, int which) {
    const auto& all = numbers<float>(Values::normal);
    return Cells<float>(
        [&](int64_t, int64_t c) { return d.bias ? all[cell_bits(d.seed + 60, which, c) % all.size()] : 0.f; }, 1, d.n,
        d.n, (which + int64_t(d.seed)) % 2, 0);
  }
  bool inputs_unchanged() const { return bias.unchanged(); }
  auto sink() const {
    return k::bias(bias.at()) | DrawnActivation(this->d.activation) | k::store(this->data(), this->ld());
  }
  template <class Sum>
  Real<> want(int64_t, int64_t c, const Sum& sum) const {
    return activated(this->d.activation, sum(0, c) + Real<>(bias.value(0, c)));
  }
};

// Added to what is there, or to another matrix.
template <class T>
struct Residual : Results<T> {
  Cells<float> bias;
  Cells<T> residual;
  explicit Residual(const DrawnProduct& d, int64_t first = 0)
      : Results<T>(d, 1),
        bias(Biased<T>::bias_of(d, 0)),
        residual(d.seed + 70, Values::normal, d.rows, d.n, d.residual.ld<T>(d.n), d.residual.shift<T>(), first) {
    if (d.elsewhere) return;
    Device<T>& y = *this->y[0];
    for (int64_t r = 0; r < d.rows; ++r)
      for (int64_t c = 0; c < d.n; ++c) y.set(r, c, residual.get(r, c));
    y.upload();
  }
  bool inputs_unchanged() const { return bias.unchanged() && residual.unchanged(); }
  auto sink() const {
    const T* p = this->d.elsewhere ? residual.at() : this->data();
    return k::bias(bias.at()) | DrawnActivation(this->d.activation) |
           k::add(k::load(p, this->d.elsewhere ? residual.ld() : this->ld())) | k::store(this->data(), this->ld());
  }
  template <class Sum>
  Real<> want(int64_t r, int64_t c, const Sum& sum) const {
    return activated(this->d.activation, sum(0, c) + Real<>(bias.value(0, c))) + Real<>(residual.value(r, c));
  }
};

template <class T>
struct Joined : Results<T> {
  Cells<float> of_gate, of_up;
  explicit Joined(const DrawnProduct& d, int64_t = 0)
      : Results<T>(d, 1), of_gate(Biased<T>::bias_of(d, 0)), of_up(Biased<T>::bias_of(d, 1)) {}
  bool inputs_unchanged() const { return of_gate.unchanged() && of_up.unchanged(); }
  auto sink() const {
    return k::glu(DrawnActivation(this->d.activation)).of(k::bias(of_gate.at()), k::bias(of_up.at())) |
           k::store(this->data(), this->ld());
  }
  template <class Sum>
  Real<> want(int64_t, int64_t c, const Sum& sum) const {
    return activated(this->d.activation, sum(0, c) + Real<>(of_gate.value(0, c))) *
           (sum(1, c) + Real<>(of_up.value(0, c)));
  }
};

template <class T>
struct Distributed : Results<T> {
  explicit Distributed(const DrawnProduct& d, int64_t = 0) : Results<T>(d, 3) {}
  auto sink() const {
    const auto part = [&](int i) { return k::scale(0.5) | k::store(this->data(i), this->ld(i)); };
    return k::apart(part(0), this->d.parts[0], part(1), this->d.parts[1], part(2), this->d.parts[2]);
  }
  template <class Sum>
  Real<> want(int64_t, int64_t c, const Sum& sum) const {
    return sum(0, c) * Real<>(0.5);
  }
};

template <class T>
struct RopeQkv : Results<T> {
  Rotary rotary;
  explicit RopeQkv(const DrawnProduct& d, int64_t first = 0) : Results<T>(d, 3), rotary(d, first) {}
  bool inputs_unchanged() const { return rotary.unchanged(); }
  auto sink() const {
    const auto& p = this->d.parts;
    const k::Rope rope = rotary.map();
    return k::qkv(rope | k::store(this->data(0), this->ld(0)), p[0], rope | k::store(this->data(1), this->ld(1)), p[1],
                  k::store(this->data(2), this->ld(2)), p[2]);
  }
  template <class Sum>
  Real<> want(int64_t r, int64_t c, const Sum& sum) const {
    const auto& p = this->d.parts;
    if (c >= p[0] + p[1]) return sum(0, c);
    const int64_t begin = c < p[0] ? 0 : p[0];
    return rotary.turn([&](int64_t at) { return sum(0, begin + at); }, r, c - begin);
  }
};

// Codes of 8 bits: scales of tokens and outputs behind the product.
template <class T>
struct ScaledBehind : Results<T> {
  Cells<float> of_rows, of_columns;
  explicit ScaledBehind(const DrawnProduct& d, int64_t first = 0)
      : Results<T>(d, 1),
        of_rows([&](int64_t, int64_t c) { return number(d, 1, c + first); }, 1, d.rows, d.rows, 0, 0),
        of_columns([&](int64_t, int64_t c) { return number(d, 2, c); }, 1, d.n, d.n, 0, 0) {}
  bool inputs_unchanged() const { return of_rows.unchanged() && of_columns.unchanged(); }
  static float number(const DrawnProduct& d, int64_t which, int64_t at) {
    const auto& all = numbers<float>(Values::scales);
    return all[cell_bits(d.seed + 80, which, at) % all.size()];
  }
  auto sink() const {
    return k::mul(k::per_row(of_rows.at())) | k::mul(k::row(of_columns.at())) | k::store(this->data(), this->ld());
  }
  template <class Sum>
  Real<> want(int64_t r, int64_t c, const Sum& sum) const {
    return sum(0, c) * Real<>(of_rows.value(0, r)) * Real<>(of_columns.value(0, c));
  }
};

// ---- one call -------------------------------------------------------------------------------------------------------

// U: the type that tensor cores multiply.
template <class U, class X, class W, class O>
class RandomProduct {
 public:
  explicit RandomProduct(const DrawnProduct& drawn, int64_t first = 0)
      : d(drawn),
        x(d, first),
        w(d, first),
        out(d, first),
        offsets(1, int64_t(d.offsets.size()), int64_t(d.offsets.size())) {
    for (size_t i = 0; i < d.offsets.size(); ++i) offsets.set(0, int64_t(i), d.offsets[i]);
    offsets.upload();
    for (const auto& y : out.y) before.push_back(y->bytes());
  }

  std::string run() {
    const bool empty = d.rows == 0 || d.n == 0 || d.m == 0;
    if (std::string wrong = make_room(); !wrong.empty()) return wrong;
    k::MatmulPlan plan;
    const k::Status planned = plan_of(d.policy, plan), status = call(exec(), d.policy);
    stream.wait();
    const std::string reason = status.reason();
    if (planned.code() != status.code()) return "the plan says: " + text(planned) + ", and the call: " + reason;
    if (!status) {
      if (std::string wrong = refused(status); !wrong.empty()) return wrong;
      for (const auto& y : out.y)
        if (!y->unchanged()) return "something was written, though the call was refused: " + reason;
      // The same without what was refused.
      if (status.code() == k::Code::invalid)
        d.room = Room::none;
      else {
        d.policy.path = Path::automatic;
        d.policy.tile_tokens = d.policy.tile_rows = d.policy.tiles_at_once = 0;
      }
      std::string wrong = run();
      return wrong.empty() ? "" : wrong + " (without what was refused: " + reason + ")";
    }
    const auto first = bits();
    if (std::string wrong = check_all(plan, empty); !wrong.empty()) return wrong + plan_text(plan);
    const auto same = [&](const char* what) { return bits() == first ? std::string() : what + plan_text(plan); };

    restore();
    if (const k::Status again = call(exec(), d.policy); !again) return std::string("a second call: ") + again.reason();
    stream.wait();
    if (std::string wrong = same("a second call gives other bits"); !wrong.empty()) return wrong;
    if (d.graph) {
      restore();
      k::Status captured;
      const Graph graph(stream, [&] { captured = call(exec(), d.policy); });
      if (!captured) return std::string("captured: ") + captured.reason();
      for (int i = 0; i < 2; ++i) {
        restore();
        graph.replay();
        if (std::string wrong = same("a graph gives other bits"); !wrong.empty()) return wrong;
      }
    }
    if (empty) return "";
    if (d.slow_inputs && d.k > 0) {
      restore();
      if (std::string wrong = call_with_slow_inputs(); !wrong.empty()) return wrong;
      if (std::string wrong = same("inputs that are written late give other bits"); !wrong.empty()) return wrong;
    }
    // Where the plan's path and tile are not those for rounded operands, they are a policy for the call itself.
    if (!plan.inputs_rounded && !plan.weights_rounded) {
      restore();
      const k::Status of_plan = call(exec(), plan);
      if (!of_plan) return std::string("the plan as a policy is refused: ") + of_plan.reason() + plan_text(plan);
      stream.wait();
      if (std::string wrong = same("the plan as a policy gives other bits"); !wrong.empty()) return wrong;
    }
    if (d.policy.batch_invariant && !d.several()) return check_invariant();
    return "";
  }

  bool inputs_unchanged() const {
    return x.unchanged() && w.unchanged() && out.inputs_unchanged() && offsets.unchanged();
  }
  k::Status call(const k::Exec& ex, const k::MatmulPolicy& policy) const {
    return k::matmul(ex, x.source(), w.source(), out.sink(), {d.m, d.n, d.k}, groups(), policy);
  }
  k::Exec exec() const {
    k::DeviceInfo device = k::Exec(stream).device();
    if (d.sms > 0) device.sm_count = std::min(device.sm_count, d.sms);
    if (d.gbs >= 0) device.memory_gbs = d.gbs;
    k::Exec ex(stream, device);
    ex.programmatic(d.programmatic).constant_weights(d.constant);
    return workspace ? ex.workspace(workspace->data(), workspace->bytes()) : ex;
  }

  DrawnProduct d;
  Stream stream;
  X x;
  W w;
  O out;
  Device<int32_t> offsets;
  std::unique_ptr<Scratch> workspace;
  std::vector<std::vector<unsigned char>> before;

 private:
  k::Groups groups() const { return {d.count, d.offsets.empty() ? nullptr : offsets.data()}; }
  k::Status plan_of(const k::MatmulPolicy& policy, k::MatmulPlan& plan) const {
    return k::matmul_plan(exec(), x.source(), w.source(), out.sink(), {d.m, d.n, d.k}, groups(), policy, plan);
  }
  std::string make_room() {
    workspace.reset();
    if (d.room == Room::none) return "";
    const size_t exact =
        k::matmul_workspace_bytes(exec(), x.source(), w.source(), out.sink(), {d.m, d.n, d.k}, groups(), d.policy);
    if (exact > size_t(1) << 30) return "the workspace would have " + std::to_string(exact) + " bytes";
    workspace = make_workspace(d.room, int64_t(exact), d.seed + 99);
    return "";
  }
  void restore() {
    for (size_t i = 0; i < before.size(); ++i) out.y[i]->restore(before[i]);
  }
  std::vector<std::vector<unsigned char>> bits() {
    std::vector<std::vector<unsigned char>> all;
    for (const auto& y : out.y) y->download(), all.push_back(y->bytes());
    return all;
  }
  static std::string plan_text(const k::MatmulPlan& p) {
    std::ostringstream text;
    text << " [" << k::to_string(p.path) << " " << p.tile_tokens << " x " << p.tile_rows << " at once "
         << p.tiles_at_once << ", " << p.splits << " splits, packs " << p.input_pack << " " << p.weight_pack
         << (p.inputs_rounded ? ", inputs rounded" : "") << (p.weights_rounded ? ", weights rounded" : "")
         << (p.weights_copied ? ", copied" : "") << (p.in_eight ? ", in eight" : "") << "]";
    return text.str();
  }

  // What docs/matmul.md says is refused.
  std::string refused(const k::Status& status) const {
    const k::MatmulPolicy& p = d.policy;
    const bool tile = p.tile_tokens != 0 || p.tile_rows != 0 || p.tiles_at_once != 0;
    const std::string reason = std::string("refused: ") + status.reason();
    if (status.code() == k::Code::invalid) return p.batch_invariant && d.room == Room::less ? "" : reason;
    if (status.code() != k::Code::unsupported) return reason;
    if (tile) return "";
    if (p.path == Path::automatic) return reason;
    if (d.kind.by_token) return p.path == Path::gemv ? reason : "";
    if (p.path == Path::gemm || p.path == Path::simt) return reason;
    if (p.batch_invariant || d.several()) return "";
    return p.path == Path::gemv ? reason : "";  // skinny: alignment and sizes
  }

  std::string check_all(const k::MatmulPlan& plan, bool empty) {
    for (const auto& y : out.y)
      if (!y->intact()) return "wrote outside its rows";
    if (workspace && !workspace->intact()) return "wrote outside the workspace";
    if (empty) {
      for (size_t i = 0; i < before.size(); ++i)
        if (out.y[i]->bytes() != before[i]) return "something was written, though there is nothing to do";
      return "";
    }
    // The last rows may belong to no group.
    for (size_t i = 0; !d.offsets.empty() && d.offsets.back() < d.rows && i < before.size(); ++i) {
      const auto& y = *out.y[i];
      const auto bytes = int64_t(sizeof(*y.data())) * ((d.rows - 1 - d.offsets.back()) * y.ld() + y.cols()) + y.guard;
      if (!std::equal(before[i].end() - bytes, before[i].end(), y.bytes().end() - bytes))
        return "wrote rows of no group";
    }
    return compare_some(plan);
  }
  // Some rows, all of their columns.
  std::string compare_some(const k::MatmulPlan& plan) {
    const bool tensor = plan.path == Path::gemm || plan.path == Path::skinny;
    const double cost = double(d.n) * double(d.k + 20) * W::matrices * (d.kind.rope ? 2 : 1);
    const int64_t some = std::max<int64_t>(2, int64_t(3e7 / cost));
    std::vector<int64_t> rows;
    Random random(d.seed + 5);
    for (int64_t r = 0; r < d.rows; ++r) {
      if (d.group_of(r) >= 0 && (d.rows <= some || r == 0 || r == d.rows - 1 || random.below(d.rows) < some))
        rows.push_back(r);
    }
    constexpr double u = std::is_same<U, k::bfloat16>::value ? 0x1p-8 : 0x1p-11;
    const int times = X::rounded + W::rounded;
    double always = 0, by_chance = tensor ? 3 * u * std::sqrt(double(times)) : 0;
    if (plan.in_eight) {
      // Tensor cores cut products of e4m3, and their sum so far, off at some 13 bits below the largest of them
      // (docs/matmul.md). What is cut off has any sign, in part, and is as large as the sum so far, which grows with
      // the root of K: over all of K, fast sums lose more than sums of 128 columns do, by the root of K / 128.
      const double longer = d.policy.fast_sums ? std::sqrt(std::max(1., double(d.k) / 128)) : 1;
      const double cut = std::is_same<U, int8_t>::value ? 0 : longer;
      always = cut * 0x1p-13, by_chance = cut * 0x1p-8;
    }
    // Half keeps no more than this of what it rounds.
    const double least = tensor && times > 0 && !plan.in_eight && u < 0x1p-8 ? 0x1p-25 : 0;
    const double sum_units = units(plan.path, d.k) + (plan.in_eight ? double(d.k) / 8 : 0);
    std::vector<Row<>> inputs(rows.size());
    in_parallel(rows.size(), [&](size_t i) { inputs[i] = x.row(rows[i]); });
    constexpr int64_t kTogether = 32;
    const int64_t parts = (d.n + kTogether - 1) / kTogether;
    std::vector<std::string> problems(rows.size() * size_t(parts));
    in_parallel(problems.size(), [&](size_t job) {
      const int64_t r = rows[job / size_t(parts)], begin = int64_t(job % size_t(parts)) * kTogether;
      const Row<>& input = inputs[job / size_t(parts)];
      const int64_t group = d.kind.by_token ? 0 : d.group_of(r);
      double small = 0;
      for (const Real<>& v : input) small += least * (1 + std::fabs(v.v));
      const auto sum = [&](int matrix, int64_t n) {
        Real<> s = product(
            r, n, d.k, [&](int64_t, int64_t i) { return input[size_t(i)]; },
            [&](int64_t, int64_t i) { return w.value(matrix, group, r, n, i); }, sum_units, always, by_chance);
        s.e += 8 * small;  // weights are smaller than 8 times their largest code's scale
        return s;
      };
      for (int64_t c = begin; c < std::min(d.n, begin + kTogether) && problems[job].empty(); ++c) {
        const Real<> want = out.want(r, c, sum);
        const auto got = out.get(r, c);
        if (within(got, want)) continue;
        std::ostringstream text;
        text.precision(9);
        text << "row " << r << " col " << c << ": got " << value_of(got) << ", want " << want.v << " +- " << want.e;
        problems[job] = text.str();
      }
    });
    int64_t wrong = 0;
    const std::string* first = nullptr;
    for (const std::string& problem : problems) {
      if (!problem.empty() && wrong++ == 0) first = &problem;
    }
    return first ? *first + " (" + std::to_string(wrong) + " of " + std::to_string(problems.size()) + " parts wrong)"
                 : "";
  }

  // Inputs that the kernel ahead writes while weights are on their way.
  std::string call_with_slow_inputs() {
    const auto& cells = x.cells();
    const size_t bytes = size_t((cells.rows() - 1) * cells.ld() + cells.cols()) * sizeof(*cells.data());
    Device<unsigned char> copy(1, int64_t(bytes), int64_t(bytes));
    auto* const p = reinterpret_cast<unsigned char*>(cells.data());
    check_cuda(cudaMemcpyAsync(copy.data(), p, bytes, cudaMemcpyDeviceToDevice, stream));
    check_cuda(cudaMemsetAsync(p, 0xff, bytes, stream));
    slow_copy<<<32, 256, 0, stream>>>(static_cast<const unsigned char*>(copy.data()), p, int64_t(bytes),
                                      int64_t(1000000));
    check_cuda(cudaGetLastError());
    k::MatmulPolicy policy = d.policy;
    policy.weights_ready = true;
    const k::Status status = call(exec(), policy);
    stream.wait();
    return status ? "" : std::string("with weights_ready: ") + status.reason();
  }

  // A few of the tokens have the same bits as among all.
  std::string check_invariant() {
    Random random(d.seed + 6);
    DrawnProduct few = d;
    few.m = few.rows = 1 + random.below(random.chance(50) ? 1 : d.m);
    const int64_t first = d.one_row || d.kind.by_token ? 0 : random.below(d.m - few.m + 1);
    RandomProduct other(few, first);
    if (workspace) other.workspace = std::make_unique<Scratch>(workspace->bytes(), 0x3c);
    const k::Status status = other.call(other.exec(), d.policy);
    if (!status) return "batch_invariant, " + std::to_string(few.m) + " tokens: " + status.reason();
    other.stream.wait();
    (void)other.bits();
    k::MatmulPlan plan;
    (void)other.plan_of(d.policy, plan);
    if (std::string wrong = other.check_all(plan, false); !wrong.empty())
      return "some of the tokens: " + wrong + plan_text(plan);
    for (int64_t r = 0; r < few.m; ++r) {
      for (int64_t c = 0; c < d.n; ++c) {
        const auto a = out.get(r + first, c), b = other.out.get(r, c);
        if (std::memcmp(&a, &b, sizeof(a)) == 0) continue;
        std::ostringstream text;
        k::MatmulPlan of_all, of_few;
        (void)plan_of(d.policy, of_all), (void)other.plan_of(d.policy, of_few);
        text << "batch_invariant: row " << r + first << " col " << c << " is " << value_of(a) << plan_text(of_all)
             << ", and " << value_of(b) << " as row " << r << " of " << few.m << plan_text(of_few);
        return text.str();
      }
    }
    return "";
  }
};

template <class U, class X, class W, class O>
void random_products(const Operands& kind, int64_t usual = 40) {
  each_random_call(
      usual, [&](uint64_t seed) { return draw_product(kind, seed); },
      [](const DrawnProduct& d) { return run_and_check_inputs(RandomProduct<U, X, W, O>(d)); });
}

}  // namespace test
