// Weights as they lie in .safetensors files, mapped into memory: nothing is copied that need not be.
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
};

// The tensors of a file that lies at `data`. Refuses in one line, which begins with `name`, whatever is not as the
// format says. Tensors of types that nothing here reads are left out and named in `others`.
std::map<std::string, Tensor> parse_safetensors(const unsigned char* data, size_t size, const std::string& name,
                                                std::map<std::string, std::string>* others = nullptr);

// Why a file, or those of a directory, have a model in a way that nothing here reads, where that is known; otherwise
// empty.
std::string why_no_weights(const std::string& path);

// All tensors of a directory: model.safetensors, or the shards that model.safetensors.index.json lists.
class Weights {
 public:
  explicit Weights(const std::string& directory);

  // Whatever is asked for counts as read.
  const Tensor& get(const std::string& name, const std::vector<int64_t>& shape) const;
  // The first tensor that nobody has asked for, or an empty string.
  std::string unread() const;
  void ignore(const std::string& name) const { read_.insert(name); }
  bool has(const std::string& name) const { return tensors_.count(name) > 0; }
  const std::map<std::string, Tensor>& all() const { return tensors_; }
  size_t bytes() const;

 private:
  std::vector<std::shared_ptr<void>> files_;  // in memory
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::string> others_;
  mutable std::set<std::string> read_;
};

// The types of 16 bits that a GPU's activations may have, the better one first: the one that --weights asks for
// (`wanted`; -1: none), or else the one in which more of the matrices are stored that have 16 bits. Where all have 32
// it is bf16, which has room for all numbers of fp32.
std::vector<Type> activation_types(int wanted, const std::map<std::string, Tensor>& tensors);
// The type on a device of weights that are stored in a type: `wanted`, or with -1 the stored one. Where the device does
// not have that, they become what its activations are, or else another type of 16 bits or more. -1 if there is none.
int type_on_device(Type stored, int wanted, Type activations, const std::function<bool(Type)>& has);

// Bytes that `rows` x `cols` weights take, and their scales.
size_t weight_bytes(Type type, int64_t rows, int64_t cols);
size_t scale_bytes(Type type, int64_t rows, int64_t cols);
// A row of a matrix as floats; any of the three types that files have.
void to_floats(Type type, const void* from, float* to, int64_t n);
// `rows` x `cols` floats as weights of a type. Numbers beyond the largest one of fp16 are infinite there.
// False if codes of 4 bits cannot be packed so.
bool from_floats(const float* from, int64_t rows, int64_t cols, Type type, void* data, void* scales);

}  // namespace llm
