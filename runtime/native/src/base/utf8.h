// Reads UTF-8 text character by character. Some functions require valid UTF-8, and the comments of
// these functions say so. All other functions accept any bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace dlm {

constexpr char32_t kCodePoints = 0x110000;
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD, which replaces invalid bytes

// Returns the length in bytes of the character whose first byte is `lead`. The text must be valid
// UTF-8.
inline size_t char_bytes(char lead) {
  const auto byte = static_cast<uint8_t>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// Returns the character at offset `at`, and increases `at` to the offset of the next character. The
// text must be valid UTF-8.
inline char32_t next_char(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) {
    return static_cast<char32_t>(static_cast<uint8_t>(text[at + i]));
  };
  const size_t bytes = char_bytes(text[at]);
  char32_t point = byte(0);
  if (bytes == 2)
    point = (point & 0x1F) << 6 | (byte(1) & 0x3F);
  else if (bytes == 3)
    point = (point & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
  else if (bytes == 4)
    point =
        (point & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
  at += bytes;
  return point;
}

// Returns true if a byte of UTF-8 text is not the first byte of a character.
inline bool continues_char(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) == 0x80; }

// Returns the number of characters of a text, which must be valid UTF-8.
inline size_t count_chars(std::string_view text) {
  size_t count = 0;
  for (const char byte : text) count += continues_char(byte) ? 0 : 1;
  return count;
}

// Removes the last character if some of its bytes are missing. Removes the whole text if the first
// bytes of the first character are missing. The other characters must be valid UTF-8.
inline void drop_cut_char(std::string& text) {
  if (text.empty() || continues_char(text[0])) return text.clear();
  size_t last = text.size() - 1;
  while (continues_char(text[last])) --last;
  if (text.size() - last < char_bytes(text[last])) text.resize(last);
}

inline void append_char(char32_t point, std::string& out) {
  const auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
  if (point < 0x80) return put(point);
  if (point < 0x800) {
    put(0xC0 | point >> 6);
  } else {
    if (point < 0x10000)
      put(0xE0 | point >> 12);
    else
      put(0xF0 | point >> 18), put(0x80 | (point >> 12 & 0x3F));
    put(0x80 | (point >> 6 & 0x3F));
  }
  put(0x80 | (point & 0x3F));
}

inline bool is_scalar(int32_t point) {
  return point >= 0 && point < 0x110000 && (point < 0xD800 || point > 0xDFFF);
}

// The kind and the size of the first character of a byte string. The character is whole, invalid
// (`broken`) or truncated (`cut`).
struct Utf8Start {
  enum Kind : uint8_t { whole, broken, cut } kind;
  size_t bytes;
};

// Finds the first character of `bytes`, which must not be empty. If the character is invalid, the
// result contains the size of the longest valid start of the character, as Unicode recommends. The
// caller can then replace all of these bytes by a single U+FFFD. Overlong forms and surrogates are
// invalid (Unicode 15, table 3-7).
inline Utf8Start utf8_start(std::string_view bytes) {
  const auto lead = static_cast<uint8_t>(bytes[0]);
  if (lead < 0x80) return {Utf8Start::whole, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Start::broken, 1};
  const size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  int lowest = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  int highest = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < size; ++i) {
    if (i == bytes.size()) return {Utf8Start::cut, i};
    const auto byte = static_cast<uint8_t>(bytes[i]);
    if (byte < lowest || byte > highest) return {Utf8Start::broken, i};
    lowest = 0x80, highest = 0xBF;
  }
  return {Utf8Start::whole, size};
}

inline bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8Start start = utf8_start(text);
    if (start.kind != Utf8Start::whole) return false;
    text.remove_prefix(start.bytes);
  }
  return true;
}

// Returns true for the characters that Unicode defines as white space.
inline bool is_space(char32_t point) {
  return (point >= 9 && point <= 13) || point == ' ' || point == 0x85 || point == 0xA0 ||
         point == 0x1680 || (point >= 0x2000 && point <= 0x200A) || point == 0x2028 ||
         point == 0x2029 || point == 0x202F || point == 0x205F || point == 0x3000;
}

}  // namespace dlm
