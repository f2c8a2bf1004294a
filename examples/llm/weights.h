// Weights in .safetensors files, which are mapped into memory, and their conversion to other types.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "device/ops.h"
#include "text.h"

namespace llm {

struct Tensor {
  Type type;
  std::vector<int64_t> shape;
  const unsigned char* data;
  size_t bytes;
  std::string other_type{};  // the name of another type than fp32, fp16 and bf16; then `data` is null
};

// The tensors of a file whose bytes are at `data`. What does not follow the format is refused in one line that begins
// with `name`.
std::map<std::string, Tensor> parse_safetensors(const unsigned char* data, size_t size, const std::string& name);

// If a file or directory has a model in a known format that this program does not read, a sentence that says so;
// otherwise empty.
std::string why_no_weights(const std::string& path);

// All tensors of a directory: model.safetensors, or the shards that model.safetensors.index.json lists.
class Weights {
 public:
  explicit Weights(const std::string& directory);

  // A tensor, which must have this shape, and then counts as read.
  const Tensor& get(const std::string& name, const std::vector<int64_t>& shape) const;
  // The name of the first tensor that was not read, or an empty string.
  std::string unread() const;
  void ignore(const std::string& name) const { read_.insert(name); }
  bool has(const std::string& name) const { return tensors_.count(name) > 0; }
  const std::map<std::string, Tensor>& all() const { return tensors_; }
  size_t bytes() const;

 private:
  std::vector<std::shared_ptr<void>> files_;  // mapped into memory
  std::map<std::string, Tensor> tensors_;
  mutable std::set<std::string> read_;
};

// The better one of the 16-bit types that a GPU's activations may have: the one that --weights asks for (wanted; -1:
// none), or else the one in which more bytes of matrices are stored. If none are, it is bf16, whose range is that of
// fp32.
Type activation_type(int wanted, const std::map<std::string, Tensor>& tensors);
// The type that weights get on a device: `wanted`, or with -1 the stored one. If the device does not have the stored
// one, the type of its activations, or else another type of 16 bits or more. -1 if there is none.
int type_on_device(Type stored, int wanted, Type activations, const std::function<bool(Type)>& has);

// The bytes of `rows` x `cols` weights, and of their scales.
size_t weight_bytes(Type type, int64_t rows, int64_t cols);
size_t scale_bytes(Type type, int64_t rows, int64_t cols);
// Converts n weights of one of the three types that files have to floats.
void to_floats(Type type, const void* from, float* to, int64_t n);
// Converts or quantizes `rows` x `cols` floats to weights of a type. Numbers beyond the largest one of fp16 become
// infinite there. int4 needs a multiple of kGroup columns.
void from_floats(const float* from, int64_t rows, int64_t cols, Type type, void* data, void* scales);

}  // namespace llm
