// Functions for sets of code points. They find Unicode properties by name, fold case, and perform
// set operations.
#pragma once

#include <optional>
#include <string_view>

#include "compile/automata/expression.h"

namespace dlm::compile {

CodePoints intersection(const CodePoints& first, const CodePoints& second);
CodePoints joined(const CodePoints& first, const CodePoints& second);
bool contains(const CodePoints& points, char32_t point);

// Returns the characters that have a Unicode property. For example, unicode_property("Alphabetic")
// returns the characters of \p{Alphabetic}, and unicode_property("Script", "Greek") returns the
// characters of \p{Script=Greek}. The comparison of names ignores case, spaces, - and _ (UAX #44,
// LM3). Returns nullopt if there is no such property.
std::optional<CodePoints> unicode_property(std::string_view name,
                                           std::optional<std::string_view> value = std::nullopt);

// Returns the characters of \w in Unicode: letters, marks, decimal numbers, connector punctuation
// and joiners (UTS #18).
const CodePoints& unicode_word();
const CodePoints& unicode_digits();  // returns the characters of \d: decimal numbers
// Returns the characters of \s: the Unicode property White_Space.
const CodePoints& unicode_spaces();

// Returns a set that contains all characters of `points`, and all characters that differ only in
// case from a character of `points`. Uses the simple case folding of Unicode.
CodePoints with_all_cases(const CodePoints& points);

}  // namespace dlm::compile
