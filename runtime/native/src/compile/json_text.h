// Builds regular languages of characters and strings, as JSON writes them.
//
// A character is written as itself where JSON allows that, and otherwise as an escape of two
// characters, like json.dumps(ensure_ascii=False) does. Strings never contain characters that need
// \uXXXX, DEL, or the controls U+0080 to U+009F.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// One code point of `points` in a JSON string.
Node spelled(Expressions& expressions, const CodePoints& points);
// Any single code point in a JSON string.
Node any_character(Expressions& expressions);
// A string of `low` to `high` code points, including its quotes.
Node any_string(Expressions& expressions, uint32_t low = 0, uint32_t high = kUnbounded);
// Returns `text` (UTF-8) as a quoted JSON string, like json.dumps(ensure_ascii=False).
std::string json_string(std::string_view text);

}  // namespace dlm::compile
