// attention() and decode() as functions of a library, for attention_peers.py, which times them in turns with their
// peers. Tensors lie as (batch, positions, heads, columns), as PyTorch's do that are contiguous. Each function returns
// null, or what is wrong.
#include <kernels/attention.cuh>

namespace k = kernels;

namespace {

template <int kDim, class T>
auto sequences(const void* key, const void* value, int64_t length, int64_t kv_heads, int64_t v_dim = kDim) {
  const auto tensor = [&](const void* p, int64_t dim) {
    return k::nhd(static_cast<const T*>(p), length, kv_heads, dim);
  };
  return k::dense_kv(tensor(key, kDim), tensor(value, v_dim), length);
}
template <int kDim, class T>
auto load(const void* q, int64_t heads) {
  return k::load(static_cast<const T*>(q), heads * kDim);
}
template <class T>
auto store(void* out, int64_t columns) {
  return k::store(static_cast<T*>(out), columns);
}

const char* reason(const k::Status& status) { return status ? nullptr : status.reason(); }

}  // namespace

// Of bfloat16. Values have v_dim columns.
extern "C" const char* kernels_attention(cudaStream_t stream, const void* q, const void* key, const void* value,
                                         void* out, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads,
                                         int64_t dim, int64_t v_dim, int causal) {
  using T = k::bfloat16;
  const auto with = [&](auto columns, const auto& score) {
    constexpr int kDim = decltype(columns)::value;
    return k::attention<kDim>(stream, load<kDim, T>(q, heads), sequences<kDim, T>(key, value, length, kv_heads, v_dim),
                              store<T>(out, heads * v_dim), {batch, length, heads, kv_heads, kDim, v_dim}, score);
  };
  const auto run = [&](const auto& score) -> k::Status {
    switch (dim) {
      case 64: return with(std::integral_constant<int, 64>(), score);
      case 128: return with(std::integral_constant<int, 128>(), score);
      case 192: return with(std::integral_constant<int, 192>(), score);
      case 256: return with(std::integral_constant<int, 256>(), score);
      default: return k::unsupported("dim is none of 64, 128, 192 and 256");
    }
  };
  return reason(causal != 0 ? run(k::causal()) : run(k::no_mask()));
}

// Of float8_e4m3, results of bfloat16, heads of 128 columns.
extern "C" const char* kernels_attention_in_8_bits(cudaStream_t stream, const void* q, const void* key,
                                                   const void* value, void* out, int64_t batch, int64_t length,
                                                   int64_t heads, int64_t kv_heads, int causal) {
  constexpr int kDim = 128;
  using T = k::float8_e4m3;
  const auto run = [&](const auto& score) {
    return k::attention<kDim>(stream, load<kDim, T>(q, heads), sequences<kDim, T>(key, value, length, kv_heads),
                              store<k::bfloat16>(out, heads * kDim), {batch, length, heads, kv_heads, kDim}, score,
                              k::Attention{}.in_8_bits());
  };
  return reason(causal != 0 ? run(k::causal()) : run(k::no_mask()));
}

// One query of each sequence, heads of 128 columns, of halves or of bfloat16.
extern "C" const char* kernels_decode(cudaStream_t stream, const void* q, const void* key, const void* value, void* out,
                                      void* memory, int64_t bytes, int64_t batch, int64_t length, int64_t heads,
                                      int64_t kv_heads, int halves) {
  constexpr int kDim = 128;
  const auto run = [&](auto type) {
    using T = decltype(type);
    return k::decode<kDim>(stream, load<kDim, T>(q, heads), sequences<kDim, T>(key, value, length, kv_heads),
                           store<T>(out, heads * kDim), {batch, 1, heads, kv_heads, kDim}, k::no_mask(),
                           k::Workspace{memory, size_t(bytes)}, k::Attention{}.most_keys(length));
  };
  return reason(halves != 0 ? run(k::half()) : run(k::bfloat16()));
}
extern "C" int64_t kernels_decode_bytes(int64_t batch, int64_t heads, int64_t kv_heads) {
  return int64_t(k::decode_workspace_bytes(k::Exec{}, {batch, 1, heads, kv_heads, 128}));
}
