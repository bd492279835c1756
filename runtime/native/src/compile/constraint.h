// From a constraint's content to its automaton over token ids.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/budget.h"
#include "compile/schema/layout.h"
#include "compile/vocabulary.h"
#include "constraints/automaton.h"
#include "text/tokenizer.h"

namespace dlm::compile {

struct Constraint {
  enum Kind { regex, schema, list, json_object, tree, grammar };

  Kind kind;
  std::string_view content;
  std::string before, behind;  // text around, which counts as part of the constrained text
  schema::Layout layout;
  std::optional<uint32_t> max_depth;
  bool any_order = false, more_properties = false;  // of objects: schema.h
  Limits limits;
};

struct Compiled {
  Automaton automaton;
  std::vector<std::string> warnings;
};

// Throws Error(DLM_INVALID_ARGUMENT) for content that is not valid or not supported, and when a
// limit is reached.
Compiled compile_constraint(const Constraint& constraint, const Vocabulary& vocabulary);

// The vocabulary of a compiled text file. Throws Error(DLM_UNSUPPORTED) if it is not byte-level.
std::unique_ptr<const Vocabulary> read_vocabulary(std::shared_ptr<const Text> text,
                                                  int32_t vocab_size, std::vector<int32_t> ends);

}  // namespace dlm::compile
