#include "compile/json/json_text.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "compile/regex/unicode.h"

namespace dlm::compile {
namespace {

// The JSON escapes that consist of a backslash and one more character.
constexpr std::pair<char32_t, const char*> kEscapes[] = {
    {8, "\\b"}, {9, "\\t"}, {10, "\\n"}, {12, "\\f"}, {13, "\\r"}, {'"', "\\\""}, {'\\', "\\\\"}};

// Returns the characters that JSON strings may contain without an escape.
const CodePoints& written() {
  static const CodePoints points{{0x20, 0x21}, {0x23, 0x5B}, {0x5D, 0x7E}, {0xA0, 0x10FFFF}};
  return points;
}

}  // namespace

Node spelled(Expressions& expressions, const CodePoints& points) {
  std::vector<Node> choices{expressions.characters(intersection(points, written()))};
  for (const auto& [point, escape] : kEscapes)
    if (contains(points, point)) choices.push_back(expressions.bytes(escape));
  return expressions.either(std::move(choices));
}

Node any_character(Expressions& expressions) { return spelled(expressions, complement({})); }

Node any_string(Expressions& expressions, uint32_t low, uint32_t high) {
  if (low > high) return expressions.nothing();
  const Node quote = expressions.bytes("\"");
  return expressions.sequence(
      {quote, expressions.repeat(any_character(expressions), low, high), quote});
}

std::string json_string(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char letter : text) {
    const auto* const escape =
        std::find_if(std::begin(kEscapes), std::end(kEscapes),
                     [&](const auto& each) { return each.first == static_cast<uint8_t>(letter); });
    if (escape != std::end(kEscapes)) {
      out += escape->second;
    } else if (static_cast<uint8_t>(letter) < 0x20) {
      out += "\\u00";
      out += kDigits[static_cast<uint8_t>(letter) >> 4];
      out += kDigits[static_cast<uint8_t>(letter) & 15];
    } else {
      out += letter;
    }
  }
  return out + '"';
}

}  // namespace dlm::compile
