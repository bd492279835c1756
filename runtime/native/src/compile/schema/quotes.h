// Removes the quotes of JSON strings, or replaces them by another token.
#pragma once

#include <string_view>

#include "compile/automata/byte_automaton.h"
#include "compile/automata/expression.h"

namespace dlm::compile::schema {

// `strings` must accept only JSON strings. Returns an automaton for the same strings without
// quotes, and with decoded escapes.
ByteAutomaton unquoted(const ByteAutomaton& strings, Budget& budget);

// `json` must contain only JSON texts without white space between their parts. Returns the same
// texts, but with names of properties without quotes, and with the added token `quote` in place of
// the quotes of other strings. Escapes are decoded. Throws an Error with status
// DLM_INVALID_ARGUMENT if every text contains a name that cannot be written without quotes, because
// it is empty, starts with a space, or contains one of the characters , : { } [ ] < " and \.
Node requoted(Expressions& expressions, Node json, std::string_view quote);

}  // namespace dlm::compile::schema
