// copy() on the CPU: activations, gates, dropout, codes, flat tensors, embeddings; and what is refused.
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/rmsnorm.h>

#include "support/elementwise.h"
#include "support/threads.h"

using namespace test;

namespace {

struct CpuDoor {
  int threads = 2;
  template <class In, class Out>
  k::Status copy(const In& in, const Out& out, int64_t rows, int64_t cols) const {
    return k::cpu::copy(on_threads(threads), in, out, rows, cols);
  }
  template <class In, class Out>
  k::Status copy(const In& in, const Out& out, int64_t n) const {
    return k::cpu::copy(on_threads(threads), in, out, n);
  }
  template <class In, class Out>
  k::Status rmsnorm(const In& in, const Out& out, int64_t rows, int64_t cols) const {
    return k::cpu::rmsnorm(on_threads(threads), in, out, rows, cols);
  }
};
using H = HostMemory;

template <class Check>
void run(const Check& check) {
  Tally t;
  check(t, CpuDoor());
  CHECK_TALLY(t);
}

}  // namespace

TEST_CASE("activations of all floats") { run([](Tally& t, const CpuDoor& door) { check_activations<H>(t, door); }); }
TEST_CASE("flat tensors") { run([](Tally& t, const CpuDoor& door) { check_flat<H>(t, door); }); }
TEST_CASE("rows, strided and repeated") { run([](Tally& t, const CpuDoor& door) { check_rows<H>(t, door); }); }
TEST_CASE("gates of two tensors and of halves") { run([](Tally& t, const CpuDoor& door) { check_gates<H>(t, door); }); }
TEST_CASE("several results") { run([](Tally& t, const CpuDoor& door) { check_several<H>(t, door); }); }
TEST_CASE("dropout, drawn and given") { run([](Tally& t, const CpuDoor& door) { check_dropout<H>(t, door); }); }
TEST_CASE("codes of given scales") { run([](Tally& t, const CpuDoor& door) { check_given_scales<H>(t, door); }); }
TEST_CASE("codes of scales found for groups") {
  run([](Tally& t, const CpuDoor& door) {
    check_found_scales<int8_t, float, H>(t, door);
    check_found_scales<int8_t, k::half, H>(t, door);
    check_found_scales<k::float8_e4m3, float, H>(t, door);
    check_found_scales<k::float8_e4m3, k::bfloat16, H>(t, door);
  });
}
TEST_CASE("codes of scales found for rows") {
  run([](Tally& t, const CpuDoor& door) {
    check_row_scales<float, H>(t, door);
    check_row_scales<k::half, H>(t, door);
    check_row_scales<k::bfloat16, H>(t, door);
  });
}
TEST_CASE("in front of a norm") { run([](Tally& t, const CpuDoor& door) { check_in_front_of_a_norm<H>(t, door); }); }
TEST_CASE("embeddings") { run([](Tally& t, const CpuDoor& door) { check_embeddings<H>(t, door); }); }

TEST_CASE("the number of threads does not matter") {
  Tally t;
  const int64_t n = 70001;
  const RandomMatrix<float> x(1, 1, n, n);
  std::vector<float> one(static_cast<size_t>(n)), several(one);
  const auto in = k::load(static_cast<const float*>(x.data())) | k::gelu() | k::dropout(0.2, 1, 2);
  for (const int threads : {2, 3, 5}) {
    REQUIRE(CpuDoor{1}.copy(in, k::store(one.data()), n));
    REQUIRE(CpuDoor{threads}.copy(in, k::store(several.data()), n));
    CHECK(std::memcmp(one.data(), several.data(), one.size() * sizeof(float)) == 0);
  }
}

// Engines may begin a pack at any column.
TEST_CASE("dropout in packs at any column") {
  Tally t;
  const auto map = k::dropout(0.5, 3, 4, 77);
  const auto check = [&](auto width) {
    constexpr int N = decltype(width)::value;
    for (int64_t row = 0; row < 3; ++row) {
      for (int64_t col = 0; col + N <= 77; ++col) {
        const k::Pack<float, N> kept = map.map(k::broadcast<N>(1.f), row, col);
        for (int i = 0; i < N; ++i)
          t.expect(kept[i] == (is_dropped(0.5, 3, 4, 20, row, col + i) ? 0.f : 2.f),
                   "packs of %d at row %d, column %d: %d", N, int(row), int(col), i);
      }
    }
  };
  check(std::integral_constant<int, 1>());
  check(std::integral_constant<int, 2>());
  check(std::integral_constant<int, 4>());
  check(std::integral_constant<int, 8>());
  check(std::integral_constant<int, 16>());
  CHECK_TALLY(t);
}

TEST_CASE("the named gates") {
  const float gate = -0.75f, up = 3.f;
  const auto join = [&](const auto& glu) {
    return glu.join(k::Pack<float, 1>{{gate}}, k::Pack<float, 1>{{up}}, 0, 0)[0];
  };
  CHECK(join(k::swiglu()) == k::silu()(gate) * up);
  CHECK(join(k::geglu()) == k::gelu()(gate) * up);
  CHECK(join(k::reglu()) == 0.f);
  CHECK(join(k::glu()) == k::sigmoid()(gate) * up);
  CHECK(join(k::glu(k::gelu_erf())) == k::gelu_erf()(gate) * up);
  CHECK(join(k::reglu().of(k::shift(1), k::scale(2) | k::shift(3))) == 0.25f * 9.f);
  const std::vector<float> both{1, -2, 3, 4, 5, 6}, bias{1, 1, -4};
  std::vector<float> y(3);
  CHECK(k::cpu::copy(k::cpu::Exec{1},
                     k::gate_up(k::load(both.data(), 6), 3) | k::reglu().of(k::bias(bias.data()), k::scale(2)),
                     k::store(y.data(), 3), 1, 3));
  CHECK(y == std::vector<float>{16, 0, 0});
  CHECK(join(k::glu(k::relu2())) == 0.f);
}

namespace {

// Maps of values that give another type than they are computed in.
struct InFloats : k::Elementwise<InFloats> {
  float operator()(float x) const { return x + 1; }
};
struct Whole : k::Elementwise<Whole> {
  int operator()(float x) const { return int(x); }
};
struct InDoubles : k::Elementwise<InDoubles> {
  double operator()(double x) const { return x / 3; }
};

}  // namespace

TEST_CASE("maps of one's own that give other types") {
  const float x[] = {1.5f, -2.25f, 3.75f, 1e6f, 0.1f};
  const double precise[] = {1 + 1e-12, -2.25, 3.75, 1e6, 0.1};
  constexpr int64_t n = 5;
  float y[n];
  double z[n];
  const k::cpu::Exec cx = on_threads(1);
  REQUIRE(k::cpu::copy(cx, k::load(x) | Whole() | InDoubles(), k::store(y), n).ok());
  for (int i = 0; i < n; ++i) CHECK(y[i] == float(double(int(x[i])) / 3));
  REQUIRE(k::cpu::copy(cx, k::load(precise) | InFloats(), k::store(z), n).ok());
  for (int i = 0; i < n; ++i) CHECK(z[i] == double(float(precise[i]) + 1));
  REQUIRE(k::cpu::copy(cx, k::load(precise) | InDoubles(), k::store(z), n).ok());
  for (int i = 0; i < n; ++i) CHECK(z[i] == precise[i] / 3);
  REQUIRE(k::cpu::copy(cx, k::gated(k::load(x), k::load(x)) | k::glu(Whole()), k::store(y), n).ok());
  for (int i = 0; i < n; ++i) CHECK(y[i] == float(int(x[i])) * x[i]);
}

TEST_CASE("what copy refuses") {
  std::vector<float> memory(4096);
  float* const p = memory.data();
  const float* const c = p;
  std::vector<int8_t> codes(4096);
  int8_t* const q = codes.data();
  const int32_t ids[4] = {0, 1, 2, 0};
  const int32_t* const between = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(ids) + 2);
  int64_t wrong = -1;
  const CpuDoor door;
  const auto out = k::store(p + 2048, 8);
  const auto says = [](const k::Status& status, const char* reason, k::Code code = k::Code::invalid) {
    INFO(status.reason());
    CHECK(status.code() == code);
    CHECK(std::string(status.reason()) == reason);
  };
  says(door.copy(k::load(c), k::store(p + 2048), -1), "copy: n is negative");
  says(door.copy(k::load(c, 8), out, -1, 8), "copy: rows is negative");
  says(door.copy(k::load(c, 8), out, 4, (int64_t(1) << 30) + 1), "copy: cols is larger than 2^30",
       k::Code::unsupported);
  says(door.copy(k::load(c), out, 4, 8), "copy: in: load: load(p) has one row, load(p, ld) several");
  says(door.copy(k::load(c, 8), k::store(p + 2048), 4, 8),
       "copy: out: store: store(p) has one row, store(p, ld) several");
  says(door.copy(k::load(c, 8) | k::tee(p + 1024), out, 4, 8), "copy: in: tee: tee(p) has one row, tee(p, ld) several");
  says(door.copy(k::load(c), k::store(p + 1), 8), "copy: out overlaps in, and not element for element");
  CHECK(door.copy(k::load(c), k::store(p), 8));
  CHECK(door.copy(k::load(c), k::store(p + 2048), 1, 8));
  CHECK(door.copy(k::load(static_cast<const float*>(nullptr)), k::store(static_cast<float*>(nullptr)), 0));

  for (const double share : {-0.1, 1.1, std::nan("")}) {
    says(door.copy(k::load(c, 8) | k::dropout(share, 1, 2, 8), out, 4, 8),
         "copy: in: dropout: p is not between 0 and 1");
    says(door.copy(k::load(c, 8) | k::dropout(share, c), out, 4, 8), "copy: in: dropout: p is not between 0 and 1");
  }
  says(door.copy(k::load(c, 8) | k::dropout(0.5, 1, 2), out, 4, 8),
       "copy: in: dropout: several rows need ld, how many numbers a row has");
  says(door.copy(k::load(c, 8) | k::dropout(0.5, 1, 2, 7), out, 4, 8),
       "copy: in: dropout: ld is smaller than cols, rows would share their numbers");

  says(door.copy(k::columns(k::load(c, 8), -1), out, 4, 4), "copy: in: columns: the first column is negative");

  const auto quantized = [&](const auto& sink) { return door.copy(k::load(c, 8), sink, 4, 8); };
  says(quantized(k::quantize(q, 7, k::tensor_scale(c))), "copy: out: quantize: the row stride is smaller than a row");
  says(quantized(k::quantize(q, 8, k::tensor_scale(static_cast<const float*>(nullptr)))),
       "copy: out: quantize: the pointer to scales is null");
  says(quantized(k::quantize(q, 8, k::group_scales(c, 1, 3))),
       "copy: out: quantize: the group or block size is not a power of two");
  says(quantized(k::quantize(q, 8, k::group_scales(c, -1, 4))),
       "copy: out: quantize: the row stride of the scales is negative");
  says(quantized(k::quantize(q, 8, p + 2048, 2, 0)), "copy: out: quantize: the group size is less than 1");
  says(quantized(k::quantize(q, 8, p + 2048, 1, 4)),
       "copy: out: quantize: the row stride of the scales is smaller than the number of groups");
  says(quantized(k::quantize(q, 8, static_cast<float*>(nullptr), 2, 4)),
       "copy: out: quantize: the pointer to the scales is null");
  says(quantized(k::quantize(static_cast<int8_t*>(nullptr), 8, p + 2048, 2, 4)),
       "copy: out: quantize: the pointer is null");

  const auto tokens = [&](const int32_t* which, int64_t vocabulary) {
    return k::embed(k::load(c, 8), which, vocabulary);
  };
  says(door.copy(tokens(nullptr, 3), out, 4, 8), "copy: in: embed: the pointer to the ids is null");
  says(door.copy(tokens(between, 3), out, 4, 8),
       "copy: in: embed: the pointer to the ids is not aligned for its elements");
  says(door.copy(tokens(ids, 0), out, 4, 8), "copy: in: embed: the vocabulary has less than one row");
  says(door.copy(tokens(ids, 3).report(reinterpret_cast<int64_t*>(reinterpret_cast<char*>(&wrong) + 4)), out, 4, 8),
       "copy: in: embed: the pointer to the report is not aligned for a number of 64 bits");
  says(door.copy(k::embed(k::load(static_cast<const float*>(nullptr), 8), ids, 3), out, 4, 8),
       "copy: in: load: the pointer is null");
  says(door.copy(tokens(ids, 3), k::store(p + 8, 8), 4, 8), "copy: out overlaps in, and not element for element");
  says(door.copy(tokens(ids, 3), k::store(p, 8), 4, 8), "copy: out overlaps in, and not element for element");
  CHECK(door.copy(tokens(ids, 3), out, 4, 8));
}
