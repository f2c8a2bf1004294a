// What the GPU's tests of decode() share: one call in each mode, against the oracle.
#pragma once

#include "gpu_attention.cuh"

namespace test {

inline const char* name_of(k::DecodeMode mode) {
  switch (mode) {
    case k::DecodeMode::automatic: return "automatic";
    case k::DecodeMode::plain: return "plain";
    case k::DecodeMode::tensor: return "tensor";
    default: return "precise";
  }
}

// What a mode may be off, besides what computing in float costs: with weights as one number of the type, or as two.
inline Precision precision_of(k::DecodeMode mode, DType keys, DType values, bool rounds_queries) {
  Precision p;
  if (mode == k::DecodeMode::plain) return p;
  const auto unit_of = [](DType type) { return type == DType::f16 ? 0x1p-11 : 0x1p-8; };
  const bool two = mode != k::DecodeMode::tensor;
  p.tensor = true;
  p.queries = !rounds_queries ? 0 : two ? unit_of(keys) * unit_of(keys) : unit_of(keys);
  p.values = two ? unit_of(values) * unit_of(values) : unit_of(values);
  if (values == DType::f16) p.least = 0x1p-25;
  return p;
}

// So many sequences that codes of two heads are worked on together, where there are four heads of keys or more.
constexpr size_t kMany = 80;
inline std::vector<int64_t> many_lengths() {
  std::vector<int64_t> lengths(kMany);
  for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = int64_t(i * i * 37 % 200);
  return lengths;
}

// decode() in a workspace of its own; twice, as the same input gives the same bits.
template <int kDim, class TQ, class TO, class View, class K, class V, class S>
void check_one_decode(Tally& t, const std::string& what, const AttentionCase& c, const View& kv, const K& key,
                      const V& value, const S& score, const ScoreModel& model, k::DecodeMode mode,
                      const Precision& precision, int64_t step, double spread) {
  Stream stream;
  std::vector<unsigned char> before;
  for (int round = 0; round < 2; ++round) {
    AttentionData<TQ, TO, DeviceMemory> data(c, spread);
    const OnDevice<int32_t> offsets(data.offsets);
    k::AttentionShape shape = data.shape();
    if (c.ragged_q) shape.q_offsets = offsets.data();
    const int64_t bytes = int64_t(k::decode_workspace_bytes(stream, shape, data.options()));
    Device<unsigned char> memory(1, bytes, bytes, 0, round == 0 ? Poison::garbage : Poison::nan);
    const k::Workspace workspace{memory.data(), size_t(bytes)};
    const k::Status status =
        k::decode<kDim>(stream, data.source(), kv, data.sink(), shape, score, workspace, data.options(), mode);
    stream.wait();
    if (round == 0) {
      data.check(t, what + ", " + name_of(mode), status, key, value, model, step, precision);
      before = data.o.bytes();
    } else {
      data.o.download();
      t.expect(data.o.bytes() == before, "%s: other bits the second time", what.c_str());
    }
    memory.download();
    t.expect(memory.intact(), "%s: wrote outside the workspace", what.c_str());
  }
}

// The same by every kernel that may take such a call: what is said of the number of keys need not be true.
template <int kDim, class TQ, class TO, class View, class K, class V, class S>
void check_decode(Tally& t, const std::string& what, const AttentionCase& c, const View& kv, const K& key,
                  const V& value, const S& score, const ScoreModel& model, k::DecodeMode mode,
                  const Precision& precision, int64_t step = 3, double spread = 1) {
  if (t.leaves_out()) return;
  check_one_decode<kDim, TQ, TO>(t, what, c, kv, key, value, score, model, mode, precision, step, spread);
  if (mode != k::DecodeMode::precise) return;
  for (const int64_t most : {1, 500, 4000}) {
    AttentionCase said = c;
    said.most_keys = most;
    check_one_decode<kDim, TQ, TO>(t, what + ", said to have " + std::to_string(most) + " keys", said, kv, key, value,
                                   score, model, mode, precision, step, spread);
  }
}

}  // namespace test
