// Compiles the keyword `pattern` of JSON Schema to regular languages (sets of texts). A pattern is
// a regular expression in the syntax of ECMA-262 with the flag u. See
// https://tc39.es/ecma262/#sec-patterns.
//
// The flag u forbids escapes such as \- and \_. Without the flag, browsers accept these escapes.
// This compiler also accepts these escapes. Such an escape matches the escaped character.
//
// Validators use the regex engine of their programming language, and these engines differ. In
// Python, for example, \d and \w match more than ASCII, the dot matches every character except \n,
// and $ also matches before a \n at the end. So the compiler can return two languages for a
// pattern. The first language consists of the strings in which every engine finds a match. If a
// string must match, the compiler allows only strings of the first language. The second language
// consists of the strings in which at least one engine finds a match. If a string must not match,
// the compiler excludes all strings of the second language. So the generated text never contains a
// string on which engines disagree.
#pragma once

#include <cstdint>
#include <string_view>

#include "compile/expression.h"

namespace dlm::compile {

// Selects one of the two languages of a pattern. `surely` means the strings in which every engine
// finds a match. `perhaps` means the strings in which at least one engine finds a match.
enum class Found : uint8_t { surely, perhaps };

// Returns the JSON strings in which the pattern is found at any position. The strings have no
// quotes, and are escaped as in json_text.h. For example, the pattern ^a$ returns only the string
// a. Throws an error if the pattern is not valid or not supported. The message is "pattern '...'
// has ... at character N".
Node pattern_in_string(Expressions& expressions, std::string_view pattern, Found found);

// Does the same as pattern_in_string(), but returns plain UTF-8 text instead of escaped JSON
// strings.
Node pattern_in_text(Expressions& expressions, std::string_view pattern, Found found);

}  // namespace dlm::compile
