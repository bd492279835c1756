// Compiles patterns of JSON Schema: regular expressions of ECMA-262 with the flag u.
//
// See https://tc39.es/ecma262/#sec-patterns. The flag u forbids escapes such as \- and \_. Browsers
// accept them without the flag, and so does this reader: they match the escaped character.
//
// Validators use the regex engine of their language, and engines differ. In Python, \d and \w match
// more than ASCII, . matches everything but \n, and $ also matches before a \n at the end. So each
// pattern has two languages: strings that match in all engines, and strings that match in at least
// one. Strings on which engines disagree are never written, whether the pattern must match or must
// not match.
#pragma once

#include <cstdint>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// surely: a match is found by ECMA-262 and every other engine. perhaps: at least one engine finds a
// match.
enum class Found : uint8_t { surely, perhaps };

// Returns the JSON strings, without their quotes (json_text.h), in which `pattern` is found. Throws
// if the pattern is not valid or not supported: "pattern '...' has ... at character N".
Node pattern_in_string(Expressions& expressions, std::string_view pattern, Found found);

// Like pattern_in_string(), but for plain text instead of JSON strings.
Node pattern_in_text(Expressions& expressions, std::string_view pattern, Found found);

}  // namespace dlm::compile
