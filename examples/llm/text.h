// Helpers that all files of the program use: one-line errors, untrusted JSON, reading whole files.
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

// Concatenates the parts, with numbers as streams write them.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// With `digits` digits after the decimal point.
std::string fixed(double x, int digits);
// A list for people: "a, b", with `last` before the last one.
std::string listed(const std::vector<std::string>& all, const char* last = ", ");

// Ends the program with exit code 1 and this line.
struct Error : std::runtime_error {
  template <class... Parts>
  explicit Error(const Parts&... parts) : std::runtime_error(concat(parts...)) {}
};

// The output cannot be written any more.
struct OutputError : Error {
  OutputError() : Error("cannot write to the standard output") {}
};

// Writes and flushes a text, or throws OutputError.
void put(std::FILE* out, const std::string& text);

// Text from files for messages: control characters become '?', so that a file cannot garble the terminal, and what is
// longer than `most` bytes is cut.
inline std::string shown(std::string text, size_t most = 100) {
  if (text.size() > most) {
    while (most > 0 && (text[most] & 0xc0) == 0x80) --most;  // not within a character
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
// Throws if the bytes are a pointer that Git LFS leaves in place of a file that it has not fetched.
void refuse_pointer(std::string_view bytes, const std::string& what);
std::string read_file(const std::string& path, size_t most = size_t(1) << 30);

}  // namespace llm
