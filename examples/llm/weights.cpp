#include "weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <kernels/core/quant.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "fields.h"

namespace llm {
namespace fs = std::filesystem;
namespace k = kernels;

// ---- safetensors: 8 bytes with the length of the JSON header, the header, and the bytes of the tensors --------------

namespace {

constexpr const char* kNoGguf = "GGUF files are not supported, only config.json with .safetensors files";
bool is_gguf(std::string_view bytes) { return bytes.substr(0, 4) == "GGUF"; }

// The JSON header; `length` becomes its length.
Json header_of(const unsigned char* data, size_t size, const std::string& name, uint64_t& length) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  refuse_pointer(bytes, name);
  if (is_gguf(bytes)) throw Error(name, ": ", kNoGguf);
  const std::string perhaps = ": the download may be incomplete";
  if (size < 8) throw Error(name, ": shorter than the header", perhaps);
  std::memcpy(&length, data, 8);  // little-endian, as the weights are
  if (length > size - 8) throw Error(name, ": the header is longer than the file", perhaps);
  if (length > (uint64_t(100) << 20)) throw Error(name, ": the header is longer than 100 MB");
  return parse_json(std::string(bytes.substr(8, size_t(length))), name);
}

}  // namespace

std::map<std::string, Tensor> parse_safetensors(const unsigned char* data, size_t size, const std::string& name) {
  static const std::map<std::string, Type> types = {{"F32", Type::f32}, {"F16", Type::f16}, {"BF16", Type::bf16}};
  uint64_t length = 0;
  const Json header = header_of(data, size, name, length);
  const int64_t room = int64_t(size - 8 - length);
  std::map<std::string, Tensor> out;
  std::vector<std::pair<int64_t, int64_t>> taken;
  for (const auto& item : Fields(header, name + ": the header").items()) {
    if (item.key() == "__metadata__") continue;
    const Fields fields(item.value(), name + ": " + shown(item.key()));
    const std::string dtype = fields.text("dtype");
    fields.list("shape");
    const auto shape = fields.integers("shape", 0, int64_t(1) << 40),
               place = fields.integers("data_offsets", 0, INT64_MAX);
    if (place.size() != 2 || place[0] > place[1]) fields.refuse("data_offsets", "not a start and an end");
    if (place[1] > room)
      fields.refuse(concat("ends ", place[1] - room, " bytes beyond the file: the download may be incomplete"));
    taken.emplace_back(place[0], place[1]);
    const auto type = types.find(dtype);
    if (type == types.end()) {
      out[item.key()] = {Type::f32, shape, nullptr, 0, shown(dtype)};
      continue;
    }
    int64_t bytes = bits_of(type->second) / 8;
    for (const int64_t d : shape) {
      if (d > 0 && bytes > (int64_t(1) << 50) / d) fields.refuse("the shape is too large");
      bytes *= d;
    }
    if (bytes != place[1] - place[0])
      fields.refuse(concat("the shape needs ", bytes, " bytes, but data_offsets has ", place[1] - place[0]));
    out[item.key()] = {type->second, shape, data + 8 + length + place[0], size_t(bytes)};
  }
  std::sort(taken.begin(), taken.end());
  for (size_t i = 1; i < taken.size(); ++i) {
    if (taken[i].first < taken[i - 1].second) throw Error(name, ": two tensors overlap");
  }
  return out;
}

// ---- files ----------------------------------------------------------------------------------------------------------

namespace {

// A file mapped into memory, as long as the pointer is held.
std::shared_ptr<void> mapped(const std::string& path, size_t& size) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) throw Error("cannot open ", path);
  struct stat about {};
  size = fstat(file, &about) == 0 && S_ISREG(about.st_mode) ? size_t(about.st_size) : 0;
  void* const data = size > 0 ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
  close(file);
  if (size == 0) throw Error(path, ": empty or not a file");
  if (data == MAP_FAILED) throw Error(path, ": cannot be memory-mapped");
  return {data, [size](void* p) { munmap(p, size); }};
}

std::string why_not_read(const fs::path& file) {
  std::error_code none;
  if (!fs::is_regular_file(file, none)) return "";
  const std::string name = file.filename().string();
  char begin[4] = {};
  std::ifstream(file, std::ios::binary).read(begin, sizeof(begin));
  if (file.extension() == ".gguf" || is_gguf({begin, sizeof(begin)})) return kNoGguf;
  if (name.rfind("pytorch_model.bin", 0) == 0)
    return "weights in pytorch_model.bin (pickle) are not supported, only .safetensors";
  if (name.rfind("consolidated.", 0) == 0)
    return "weights in " + shown(name) + " are not supported, only config.json and model.safetensors of transformers";
  return "";
}

// Names the .safetensors files of a directory, which have other names than expected.
std::string others_in(const std::string& directory) {
  std::set<std::string> names;
  std::error_code none;
  for (const auto& file : fs::directory_iterator(directory, none)) {
    if (file.path().extension() == ".safetensors") names.insert(shown(file.path().filename().string()));
  }
  if (names.empty()) return "";
  const std::string more = names.size() > 1 ? " and " + std::to_string(names.size() - 1) + " more" : "";
  return "; found " + *names.begin() + more;
}

}  // namespace

std::string why_no_weights(const std::string& path) {
  std::string why = why_not_read(path);
  if (file_exists(path + "/model.safetensors") || file_exists(path + "/model.safetensors.index.json")) return why;
  std::error_code none;
  for (const auto& file : fs::directory_iterator(path, none)) {
    if (why.empty()) why = why_not_read(file.path());
  }
  return why;
}

Weights::Weights(const std::string& directory) {
  const std::string index = directory + "/model.safetensors.index.json", single = directory + "/model.safetensors";
  std::map<std::string, std::string> where;  // tensor: file
  std::set<std::string> names;
  if (file_exists(single)) {
    names.insert("model.safetensors");
  } else if (file_exists(index)) {
    const Json json = read_json(index);
    const Fields map = Fields(json, index).object("weight_map");
    for (const auto& item : map.items()) {
      const std::string file = map.text(item.key());
      if (file.empty() || file.find('/') != std::string::npos || file.find('\0') != std::string::npos || file[0] == '.')
        throw Error(index, ": ", shown(file), " is not a file name in this directory");
      where[item.key()] = file;
      names.insert(file);
    }
    if (names.empty()) throw Error(index, ": no tensors");
  } else {
    const std::string why = why_no_weights(directory);
    if (!why.empty()) throw Error(directory, ": ", why);
    throw Error(directory, ": no model.safetensors or model.safetensors.index.json", others_in(directory));
  }
  for (const std::string& name : names) {
    size_t size = 0;
    files_.push_back(mapped(directory + "/" + name, size));
    const auto* const data = static_cast<const unsigned char*>(files_.back().get());
    for (auto& [tensor, value] : parse_safetensors(data, size, name)) {
      if (!where.empty() && (where.count(tensor) == 0 || where[tensor] != name))
        throw Error(name, ": ", shown(tensor), " is not listed for this file in model.safetensors.index.json");
      tensors_[tensor] = value;
    }
  }
  for (const auto& [tensor, file] : where) {
    if (tensors_.count(tensor) == 0) throw Error(file, ": ", shown(tensor), " is missing");
  }
}

const Tensor& Weights::get(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto at = tensors_.find(name);
  if (at == tensors_.end()) throw Error("tensor ", name, " is missing");
  const std::string& other = at->second.other_type;
  if (!other.empty()) throw Error(name, ": type ", other, " is not supported, only F32, F16 and BF16");
  read_.insert(name);
  const auto text = [](const std::vector<int64_t>& s) {
    std::string out;
    for (const int64_t d : s) out += (out.empty() ? "" : " x ") + std::to_string(d);
    return out;
  };
  if (at->second.shape != shape)
    throw Error("tensor ", name, " is ", text(at->second.shape), ", but config.json implies ", text(shape));
  return at->second;
}

std::string Weights::unread() const {
  for (const auto& item : tensors_) {
    if (read_.count(item.first) == 0) return item.first;
  }
  return "";
}

size_t Weights::bytes() const {
  size_t sum = 0;
  for (const auto& item : tensors_) sum += item.second.bytes;
  return sum;
}

// ---- types ----------------------------------------------------------------------------------------------------------

Type activation_type(int wanted, const std::map<std::string, Tensor>& tensors) {
  size_t bytes[kTypes] = {};
  for (const auto& item : tensors) {
    if (item.second.shape.size() > 1) bytes[int(item.second.type)] += item.second.bytes;  // vectors become floats
  }
  if (wanted == int(Type::f16) || wanted == int(Type::bf16)) return Type(wanted);
  return bytes[int(Type::f16)] > bytes[int(Type::bf16)] ? Type::f16 : Type::bf16;
}

int type_on_device(Type stored, int wanted, Type activations, const std::function<bool(Type)>& has) {
  if (wanted >= 0) return has(Type(wanted)) ? wanted : -1;
  for (const Type type : {stored, activations, Type::f32, Type::bf16, Type::f16}) {
    if (has(type)) return int(type);
  }
  return -1;
}

size_t weight_bytes(Type type, int64_t rows, int64_t cols) {
  return size_t(rows) * size_t(type == Type::i4 ? (cols + 7) / 8 * 4 : cols * (bits_of(type) / 8));
}

size_t scale_bytes(Type type, int64_t rows, int64_t cols) {
  if (type == Type::i4) return size_t(rows * (cols / kGroup)) * 2;
  return type == Type::i8 || type == Type::f8 ? size_t(rows) * 4 : 0;
}

namespace {

template <class T>
void widen(const void* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    T x;
    std::memcpy(&x, static_cast<const char*>(from) + i * int64_t(sizeof(T)), sizeof(T));
    to[i] = k::convert<float>(x);
  }
}

template <class T>
void narrow(const float* from, void* to, int64_t n, float factor = 1) {
  for (int64_t i = 0; i < n; ++i) static_cast<T*>(to)[i] = k::convert<T>(from[i] * factor);
}

// Quantizes rows so that the largest magnitude of each becomes the largest code.
template <class T>
void scaled(const float* from, int64_t rows, int64_t cols, float largest_code, void* data, float* scales) {
  for (int64_t row = 0; row < rows; ++row, from += cols) {
    float largest = 0;
    for (int64_t i = 0; i < cols; ++i) largest = std::fmax(largest, std::fabs(from[i]));
    scales[row] = largest / largest_code;
    narrow<T>(from, static_cast<T*>(data) + row * cols, cols, largest > 0 ? largest_code / largest : 0);
  }
}

}  // namespace

void to_floats(Type type, const void* from, float* to, int64_t n) {
  if (type == Type::f32) widen<float>(from, to, n);
  else if (type == Type::f16) widen<k::half>(from, to, n);
  else widen<k::bfloat16>(from, to, n);
}

void from_floats(const float* from, int64_t rows, int64_t cols, Type type, void* data, void* scales) {
  switch (type) {
    case Type::f32:
      return narrow<float>(from, data, rows * cols);
    case Type::f16:
      return narrow<k::half>(from, data, rows * cols);
    case Type::bf16:
      return narrow<k::bfloat16>(from, data, rows * cols);
    case Type::f8:
      return scaled<k::float8_e4m3>(from, rows, cols, 448, data, static_cast<float*>(scales));
    case Type::i8:
      return scaled<int8_t>(from, rows, cols, 127, data, static_cast<float*>(scales));
    case Type::i4:  // fails only for other numbers of columns
      (void)k::pack_int4(from, cols, rows, cols, kGroup, static_cast<uint32_t*>(data), static_cast<k::half*>(scales));
  }
}

}  // namespace llm
