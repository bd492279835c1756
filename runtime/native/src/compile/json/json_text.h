// Builds regular languages (sets of texts) for the characters and strings in JSON text.
//
// Characters are written as in Python's json.dumps(ensure_ascii=False). If JSON allows a character
// without an escape, it is written without an escape. Otherwise it is written as an escape of two
// characters, such as \n. Characters that need an escape of the form \uXXXX are left out. DEL and
// the control characters U+0080 to U+009F are left out too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "compile/automata/expression.h"

namespace dlm::compile {

// For each code point in `points`, returns the text of this code point inside a JSON string.
Node spelled(Expressions& expressions, const CodePoints& points);
// Does the same as spelled(), for all code points.
Node any_character(Expressions& expressions);
// Returns the texts, with quotes, of all JSON strings of `low` to `high` code points.
Node any_string(Expressions& expressions, uint32_t low = 0, uint32_t high = kUnbounded);
// Returns UTF-8 text as a JSON string with quotes, as json.dumps(ensure_ascii=False) writes it.
std::string json_string(std::string_view text);

}  // namespace dlm::compile
