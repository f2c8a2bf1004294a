// Models of golden files (examples/llm/golden/make.py), written as Hugging Face directories.
#pragma once

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "session.h"
#include "weights.h"

namespace golden {

namespace fs = std::filesystem;
using llm::Json;
using llm::Type;

// A folder that is gone with its object.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "kernels_llm_XXXXXX").string();
    if (mkdtemp(&name[0]) == nullptr) throw llm::Error("no temporary folder");
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ + "/" + name, std::ios::binary) << bytes;
  }

 private:
  std::string path_;
};

// offset + scale * n / 128, as make.py's elements().
inline std::vector<float> elements(const std::string& name, int64_t count, double scale, double offset) {
  uint64_t seed = 14695981039346656037ull;
  for (const char c : name) seed = (seed ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  std::vector<float> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    uint64_t x = uint64_t(i) + seed;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    out[size_t(i)] = float(offset + scale * double(int64_t(x >> 56) - 128) / 128);
  }
  return out;
}

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

// type_of(name) is the type of a tensor, which begins at a multiple of its size.
template <class TypeOf>
std::string safetensors_of(const std::vector<Tensor>& tensors, const TypeOf& type_of) {
  Json header = Json::object();
  std::string data;
  for (const Tensor& tensor : tensors) {
    const Type type = type_of(tensor.name);
    while (data.size() % size_t(llm::bits_of(type) / 8) != 0) data += '\0';
    const size_t begin = data.size(), bytes = tensor.values.size() * size_t(llm::bits_of(type) / 8);
    data.resize(begin + bytes);
    llm::from_floats(tensor.values.data(), 1, int64_t(tensor.values.size()), type, &data[begin], nullptr);
    header[tensor.name] = {{"dtype", type == Type::f32   ? "F32"
                                     : type == Type::f16 ? "F16"
                                                         : "BF16"},
                           {"shape", tensor.shape},
                           {"data_offsets", {begin, begin + bytes}}};
  }
  std::string text = header.dump();
  while (text.size() % 8 != 0) text += ' ';
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = char(text.size() >> (8 * i) & 255);
  return out + text + data;
}
inline std::string safetensors(const std::vector<Tensor>& tensors, Type type) {
  return safetensors_of(tensors, [&](const std::string&) { return type; });
}

inline std::vector<Tensor> tensors_of(const Json& golden) {
  std::vector<Tensor> out;
  for (const Json& item : golden["tensors"]) {
    Tensor tensor{item[0].get<std::string>(), item[1].get<std::vector<int64_t>>(), {}};
    int64_t count = 1;
    for (const int64_t d : tensor.shape) count *= d;
    tensor.values = elements(tensor.name, count, item[2].get<double>(), item[3].get<double>());
    out.push_back(tensor);
  }
  return out;
}

inline Json read(const std::string& name) { return llm::read_json(std::string(LLM_GOLDEN) + "/" + name + ".json"); }

// A tokenizer of 96 letters, where only numbers count.
inline std::string tokenizer() {
  Json vocabulary = Json::object();
  for (int i = 0; i < 96; ++i) vocabulary[std::string(1, char('!' + i % 94)) + (i < 94 ? "" : "!")] = i;
  return Json{{"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", Json::array()}}},
              {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}}}
      .dump();
}

// Experts in tensors of their own, as transformers 4 wrote them; Mixtral's with names of their own.
inline std::vector<Tensor> apart(const std::vector<Tensor>& all, bool mixtral) {
  std::vector<Tensor> out;
  for (const Tensor& tensor : all) {
    const size_t at = tensor.name.find("mlp.experts."), gate = tensor.name.find("mlp.gate.");
    if (at == std::string::npos) {
      out.push_back(tensor);
      if (mixtral && gate != std::string::npos) out.back().name.replace(gate, 9, "block_sparse_moe.gate.");
      continue;
    }
    const bool both = tensor.name.find("gate_up_proj") != std::string::npos;
    const int64_t parts = both ? 2 : 1, rows = tensor.shape[1] / parts, cols = tensor.shape[2];
    const char* const names[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
    for (int64_t e = 0; e < tensor.shape[0]; ++e) {
      for (int64_t part = 0; part < parts; ++part) {
        const auto first = tensor.values.begin() + (e * parts + part) * rows * cols;
        const std::string name = tensor.name.substr(0, at) + (mixtral ? "block_sparse_moe" : "mlp") + ".experts." +
                                 std::to_string(e) + "." + names[mixtral][both ? part : 2] + ".weight";
        out.push_back({name, {rows, cols}, {first, first + rows * cols}});
      }
    }
  }
  return out;
}

inline void write_model(const Folder& folder, const Json& golden, const Json& config, Type type,
                        bool old_names = false) {
  folder.write("config.json", config.dump());
  folder.write("tokenizer.json", tokenizer());
  folder.write(
      "model.safetensors",
      safetensors(old_names ? apart(tensors_of(golden), config["model_type"] == "mixtral") : tensors_of(golden), type));
}

// The directory of a golden file's model, which is gone with its object.
class ModelFolder : public Folder {
 public:
  explicit ModelFolder(const Json& golden, Type type = Type::f32) {
    write_model(*this, golden, golden["config"], type);
  }
};

// The largest difference between logits, relative to the largest of them.
inline double difference(const float* logits, const std::vector<float>& expected) {
  double most = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double d = std::fabs(double(logits[i]) - expected[i]);
    most = d == d ? std::fmax(most, d) : INFINITY;
    largest = std::fmax(largest, std::fabs(double(expected[i])));
  }
  return most / largest;
}

}  // namespace golden
