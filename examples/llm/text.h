// Small things that all files of the program need: errors of one line, JSON that is not trusted, whole files.
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace llm {

// The parts one behind the other, numbers as streams write them.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// With so many digits behind the point.
std::string fixed(double x, int digits);
// As a list for people: a, b.
std::string listed(const std::vector<std::string>& all, const char* last = ", ");

// Ends the program with exit code 1 and this line.
struct Error : std::runtime_error {
  template <class... Parts>
  explicit Error(const Parts&... parts) : std::runtime_error(concat(parts...)) {}
};

// The output is gone, and nothing that is said in it from here on arrives.
struct OutputError : Error {
  OutputError() : Error("the output cannot be written") {}
};

// Writes a text at once, or throws OutputError.
void put(std::FILE* out, const std::string& text);

// What a file says about itself must not be able to garble the terminal: control characters become '?'.
inline std::string shown(std::string text, size_t most = 100) {
  if (text.size() > most) {
    while (most > 0 && (text[most] & 0xc0) == 0x80) --most;  // no half of a character
    text = text.substr(0, most) + "...";
  }
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  }
  return text;
}

using Json = nlohmann::json;

Json parse_json(const std::string& text, const std::string& what);
Json read_json(const std::string& path);
bool file_exists(const std::string& path);
// What Git LFS leaves in place of a file that it has not fetched.
void refuse_pointer(std::string_view bytes, const std::string& what);
std::string read_file(const std::string& path, size_t most = size_t(1) << 30);

}  // namespace llm
