// Packs of every width against plain loops over arrays.
#include <kernels/core/memory.h>
#include <kernels/core/pack.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "support/tally.h"

namespace k = kernels;

namespace {

// f(std::integral_constant<int, N>) for every pack width.
template <int... kWidths, class F>
void for_widths(F f) { (f(std::integral_constant<int, kWidths>{}), ...); }
template <class F>
void for_all_widths(F f) { for_widths<1, 2, 3, 4, 8, 16, 32>(f); }

// Small whole numbers: every sum and product below is exact, in any order.
template <class T, int N>
k::Pack<T, N> some(int seed) {
  std::mt19937 random(seed);
  k::Pack<T, N> out;
  for (int i = 0; i < N; ++i) out[i] = T(int(random() % 61) - 30);
  return out;
}

template <class T>
void expect_elements(test::Tally& t, const char* what, int n, const T* got, const T* a, const T* b, T c,
                     T (*want)(T, T, T)) {
  for (int i = 0; i < n; ++i) {
    const T w = want(a[i], b[i], c);
    t.expect(got[i] == w, "N %d, element %d, %s: got %g, want %g", n, i, what, double(got[i]), double(w));
  }
}

}  // namespace

TEMPLATE_TEST_CASE("pack arithmetic is elementwise", "", float, double, int32_t) {
  using T = TestType;
  test::Tally t;
  for_all_widths([&t](auto width) {
    constexpr int N = decltype(width)::value;
    for (int seed = 0; seed < 20; ++seed) {
      const auto a = some<T, N>(seed);
      const auto b = k::max(some<T, N>(seed + 100), T(1));
      const T c = T(seed + 1);
      const auto check = [&](const char* what, const k::Pack<T, N>& got, T (*want)(T, T, T)) {
        expect_elements(t, what, N, got.v, a.v, b.v, c, want);
      };
      check("a + b", a + b, [](T x, T y, T) { return x + y; });
      check("a - b", a - b, [](T x, T y, T) { return x - y; });
      check("a * b", a * b, [](T x, T y, T) { return x * y; });
      check("a / b", a / b, [](T x, T y, T) { return x / y; });
      check("a + c", a + c, [](T x, T, T z) { return x + z; });
      check("a - c", a - c, [](T x, T, T z) { return x - z; });
      check("a * c", a * c, [](T x, T, T z) { return x * z; });
      check("a / c", a / c, [](T x, T, T z) { return x / z; });
      check("min", k::min(a, c), [](T x, T, T z) { return x < z ? x : z; });
      check("max", k::max(a, c), [](T x, T, T z) { return x > z ? x : z; });
      check("broadcast", k::broadcast<N>(c), [](T, T, T z) { return z; });
      check("transform", k::transform(a, [](T x) { return x * T(2); }), [](T x, T, T) { return x * T(2); });
      check("transform of two", k::transform(a, b, [](T x, T y) { return x * T(3) - y; }),
            [](T x, T y, T) { return x * T(3) - y; });
    }
  });
  CHECK_TALLY(t);
}

TEST_CASE("pack types") {
  CHECK(sizeof(k::Pack<k::half, 8>) == 16);
  CHECK(sizeof(k::Pack<float, 3>) == 12);
  CHECK(k::Pack<float, 4>::size == 4);
  CHECK(std::is_same<k::Pack<double, 2>::value_type, double>::value);
  const auto as_int = k::transform(k::broadcast<4>(2.75f), [](float x) { return int(x); });
  CHECK(std::is_same<decltype(as_int), const k::Pack<int, 4>>::value);
  CHECK(as_int[3] == 2);
}

TEMPLATE_TEST_CASE("pack reductions", "", float, double) {
  test::Tally t;
  for_all_widths([&t](auto width) {
    constexpr int N = decltype(width)::value;
    for (int seed = 0; seed < 50; ++seed) {
      const auto a = some<TestType, N>(seed), b = some<TestType, N>(seed + 1000);
      double sum = 0, dot = 0, most = -1e9;
      for (int i = 0; i < N; ++i) {
        sum += a[i];
        dot += double(a[i]) * b[i];
        most = std::fmax(most, a[i]);
      }
      t.expect(k::sum(a) == sum, "N %d: sum %g, want %g", N, double(k::sum(a)), sum);
      t.expect(k::dot(a, b) == dot, "N %d: dot %g, want %g", N, double(k::dot(a, b)), dot);
      t.expect(k::max_of(a) == most, "N %d: max %g, want %g", N, double(k::max_of(a)), most);
    }
    // The largest in every place, and all others -inf.
    for (int at = 0; at < N; ++at) {
      auto a = k::broadcast<N>(-std::numeric_limits<TestType>::infinity());
      t.expect(k::max_of(a) == -std::numeric_limits<TestType>::infinity(), "N %d: max of -inf", N);
      a[at] = TestType(-5);
      t.expect(k::max_of(a) == TestType(-5), "N %d: max at %d", N, at);
      auto ones = k::broadcast<N>(TestType(0));
      ones[at] = TestType(1);
      t.expect(k::sum(ones) == TestType(1), "N %d: sum at %d", N, at);
    }
  });
  CHECK_TALLY(t);
}

// Sums of sets: every element is used once and only once, whatever the shape of the tree.
TEST_CASE("fold uses every element once") {
  test::Tally t;
  for_all_widths([&t](auto width) {
    constexpr int N = decltype(width)::value;
    k::Pack<uint64_t, N> bits;
    for (int i = 0; i < N; ++i) bits[i] = uint64_t(1) << (2 * i % 63);
    uint64_t want = 0;
    for (int i = 0; i < N; ++i) want += bits[i];
    t.expect(k::fold(bits, [](uint64_t a, uint64_t b) { return a + b; }) == want, "N %d", N);
  });
  CHECK_TALLY(t);
}

TEST_CASE("sums of packs stay within rounding") {
  test::Tally t;
  for_all_widths([&t](auto width) {
    constexpr int N = decltype(width)::value;
    std::mt19937 random(N);
    std::normal_distribution<float> normal;
    for (int round = 0; round < 1000; ++round) {
      k::Pack<float, N> a;
      double want = 0, size = 0;
      for (int i = 0; i < N; ++i) {
        a[i] = normal(random) * (round % 10 == 0 ? 1e4f : 1.f);
        want += a[i];
        size += std::fabs(a[i]);
      }
      // Each of the at most N - 1 additions rounds by half an epsilon of a partial sum.
      const double limit = 0.5 * N * std::numeric_limits<float>::epsilon() * size;
      t.expect(std::fabs(k::sum(a) - want) <= limit, "N %d: got %.9g, want %.17g", N, k::sum(a), want);
    }
  });
  CHECK_TALLY(t);
}

TEST_CASE("a pack's sum, maximum and dot show a NaN or an infinity, except that a maximum may pass over a NaN") {
  test::Tally t;
  for_all_widths([&t](auto width) {
    constexpr int N = decltype(width)::value;
    for (int at = 0; at < N; ++at) {
      auto a = k::broadcast<N>(1.f);
      a[at] = std::nanf("");
      t.expect(std::isnan(k::sum(a)), "N %d: NaN at %d lost by sum", N, at);
      t.expect(std::isnan(k::dot(a, k::broadcast<N>(0.f))), "N %d: NaN at %d lost by dot", N, at);
      a[at] = INFINITY;
      t.expect(k::sum(a) == INFINITY && k::max_of(a) == INFINITY, "N %d: infinity at %d", N, at);
      a[at] = -INFINITY;
      t.expect(k::sum(a) == -INFINITY, "N %d: -infinity at %d", N, at);
    }
  });
  CHECK_TALLY(t);
}

namespace {

// The pack conversion has vector paths; it must give what the scalar one gives.
template <class To, class From>
void check_convert(test::Tally& t, const char* what) {
  for_all_widths([&](auto width) {
    constexpr int N = decltype(width)::value;
    std::mt19937 random(N);
    for (int round = 0; round < 200; ++round) {
      k::Pack<From, N> in;
      for (int i = 0; i < N; ++i) {
        const float magnitudes[] = {1.f, 1e-3f, 1e-6f, 1e4f, 1e9f};
        float x = magnitudes[random() % 5] * float(int(random() % 2001) - 1000) / 7.f;
        if (random() % 16 == 0) x = INFINITY;
        if (random() % 16 == 0) x = -INFINITY;
        in[i] = k::convert<From>(x);
      }
      const k::Pack<To, N> out = k::convert<To>(in);
      for (int i = 0; i < N; ++i) {
        const To want = k::convert<To>(in[i]);
        t.expect(std::memcmp(&out[i], &want, sizeof(To)) == 0, "%s, N %d, element %d: %g became %g", what, N, i,
                 double(k::convert<float>(in[i])), double(k::convert<float>(out[i])));
      }
    }
  });
}

}  // namespace

TEMPLATE_TEST_CASE("packs convert as their elements do", "", k::half, k::bfloat16, float, double, k::float8_e4m3,
                   k::float8_e5m2, int8_t) {
  test::Tally t;
  check_convert<float, TestType>(t, "to float");
  check_convert<TestType, float>(t, "from float");
  check_convert<k::half, TestType>(t, "to half");
  CHECK_TALLY(t);
}

TEST_CASE("packs of every half code convert to float and back") {
  test::Tally t;
  for_widths<2, 4, 8, 16, 32>([&t](auto width) {
    constexpr int N = decltype(width)::value;
    for (uint32_t first = 0; first < 65536; first += N) {
      k::Pack<k::half, N> codes;
      for (int i = 0; i < N; ++i) codes[i] = k::bit_cast<k::half>(uint16_t(first + i));
      const auto wide = k::convert<float>(codes);
      const auto back = k::convert<k::half>(wide);
      for (int i = 0; i < N; ++i) {
        const uint32_t code = first + i;
        t.expect(k::bit_cast<uint32_t>(wide[i]) == k::bit_cast<uint32_t>(k::convert<float>(codes[i])),
                 "%x alone and in a pack of %d", code, N);
        if ((code & 0x7fff) > 0x7c00) {
          t.expect(std::isnan(wide[i]) && (k::bit_cast<uint16_t>(back[i]) & 0x7fff) > 0x7c00, "NaN %x", code);
        } else {
          t.expect(k::bit_cast<uint16_t>(back[i]) == code, "%x came back as %x", code, k::bit_cast<uint16_t>(back[i]));
        }
      }
    }
  });
  CHECK_TALLY(t);
}

// Of all exponents, NaN and infinity as well, and of both sides of where rounding turns.
TEST_CASE("packs of any floats become the halves that each alone becomes") {
  test::Tally t;
  std::mt19937 random(1);
  for_widths<2, 4, 8, 16, 32>([&](auto width) {
    constexpr int N = decltype(width)::value;
    for (int repeat = 0; repeat < 400000 / N; ++repeat) {
      k::Pack<float, N> floats;
      for (int i = 0; i < N; ++i) {
        const uint32_t near_a_turn = (uint32_t(random()) & 0xfffff000u) + uint32_t(random()) % 3 - 1;
        const uint32_t in_range = 0x32000000u + uint32_t(random()) % 0x16000000u;
        floats[i] = k::bit_cast<float>(repeat % 3 == 0 ? uint32_t(random()) : repeat % 3 == 1 ? near_a_turn : in_range);
      }
      const auto halves = k::convert<k::half>(floats);
      for (int i = 0; i < N; ++i)
        t.expect(k::bit_cast<uint16_t>(halves[i]) == k::bit_cast<uint16_t>(k::convert<k::half>(floats[i])),
                 "%x alone and in a pack of %d", k::bit_cast<uint32_t>(floats[i]), N);
    }
  });
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("packs are read and written at any address, and nothing beside them", "", uint8_t, k::half, float,
                   double) {
  test::Tally t;
  for_all_widths([&t](auto width) {
    constexpr int N = decltype(width)::value;
    constexpr size_t bytes = N * sizeof(TestType);
    std::vector<unsigned char> memory(bytes + 256);
    for (size_t offset = 0; offset < 64; offset += sizeof(TestType)) {
      for (const bool past_cache : {false, true}) {
        for (unsigned char& byte : memory) byte = 0xa5;
        // An address that is a multiple of 64, and `offset` more.
        unsigned char* base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) + 64;
        TestType* at = reinterpret_cast<TestType*>(base + offset);
        k::Pack<TestType, N> pack;
        for (size_t i = 0; i < bytes; ++i)
          reinterpret_cast<unsigned char*>(pack.v)[i] = static_cast<unsigned char>(i + 1);
        k::write<N>(at, pack, past_cache);
        const k::Pack<TestType, N> stream = k::read<N, k::Cache::stream>(at).unpack();
        const k::Pack<TestType, N> keep = k::read<N, k::Cache::keep>(at).unpack();
        t.expect(std::memcmp(at, pack.v, bytes) == 0, "N %d, offset %zu: written wrongly", N, offset);
        t.expect(std::memcmp(stream.v, pack.v, bytes) == 0, "N %d, offset %zu: read wrongly", N, offset);
        t.expect(std::memcmp(keep.v, pack.v, bytes) == 0, "N %d, offset %zu: read wrongly through the cache", N,
                 offset);
        size_t touched = 0;
        for (const unsigned char byte : memory) touched += byte != 0xa5;
        const size_t own_a5 = bytes >= 0xa5 ? 1 : 0;  // the byte 0xa5 occurs among 1, 2, 3 ... as well
        t.expect(touched == bytes - own_a5, "N %d, offset %zu: %zu bytes touched", N, offset, touched);
      }
    }
  });
  CHECK_TALLY(t);
}
