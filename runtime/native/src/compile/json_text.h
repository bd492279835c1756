// How JSON text spells characters and strings, as regular languages.
//
// A character of a string is written as itself wherever JSON allows that, or with an escape of two
// characters, as json.dumps(ensure_ascii=False) writes it. Characters that would need \uXXXX are
// not written at all, nor are DEL and the controls U+0080 to U+009F.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// One code point of `points` inside a JSON string.
Node spelled(Expressions& expressions, const CodePoints& points);
// Any one code point inside a JSON string.
Node any_character(Expressions& expressions);
// A string of `low` to `high` code points, with its quotes.
Node any_string(Expressions& expressions, uint32_t low = 0, uint32_t high = kUnbounded);
// The JSON text of a string, with its quotes, as json.dumps(ensure_ascii=False) writes it. `text`
// is UTF-8.
std::string json_string(std::string_view text);

}  // namespace dlm::compile
