// Builds regular languages (sets of texts) of the characters and strings of JSON text.
//
// Characters are written as Python's json.dumps(ensure_ascii=False) writes characters. If JSON
// allows a character without an escape, the character is written without an escape. Otherwise the
// character is written as an escape of two characters, such as \n. Characters that need an escape
// of the form \uXXXX are left out. DEL and the control characters U+0080 to U+009F are left out
// too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// Returns the texts of all code points in `points` inside a JSON string.
Node spelled(Expressions& expressions, const CodePoints& points);
// Does the same as spelled(), for all code points.
Node any_character(Expressions& expressions);
// Returns all strings of `low` to `high` code points. The strings include their quotes.
Node any_string(Expressions& expressions, uint32_t low = 0, uint32_t high = kUnbounded);
// Returns UTF-8 text as a JSON string with quotes, as json.dumps(ensure_ascii=False) writes it.
std::string json_string(std::string_view text);

}  // namespace dlm::compile
