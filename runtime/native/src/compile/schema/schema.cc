#include "compile/schema/schema.h"

#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "compile/automata/depths.h"
#include "compile/grammar/grammar.h"
#include "compile/regex/regex.h"
#include "compile/schema/quotes.h"
#include "compile/schema/records.h"
#include "compile/schema/writer.h"

namespace dlm::compile::schema {
namespace {

using json::Value;

constexpr size_t kMostTree = 16 << 20;  // largest size of a tree's text, in bytes
constexpr int kMostNesting = 300;       // largest nesting depth of a tree's text
constexpr int64_t kMostLines = 1'000'000;

struct Extent {
  uint32_t recursion, any, characters;
};
// A list of limits for depths and string lengths. The first entry leads to the largest automaton,
// and the last entry leads to the smallest. Usually, the code uses the first entry for which the
// estimated number of states is small enough. The first entries reduce only the lengths of strings,
// because a canvas rarely has room for long strings.
constexpr Extent kExtents[] = {{3, 3, kUnbounded}, {3, 3, 2048}, {3, 3, 1024}, {2, 3, 1024},
                               {2, 2, 1024},       {1, 2, 1024}, {1, 1, 256},  {0, 1, 256}};
// By default, the code chooses depths for which the estimated number of states is at most 1 /
// kComfort of the limit for states.
constexpr double kComfort = 4;
// The code reduces the depths and lengths only if the last entry of the list reduces the estimated
// number of states to this fraction or less.
constexpr double kWorthwhile = 0.9;

WriterOptions writer_options(const Options& options, const Extent& extent) {
  WriterOptions out;
  out.layout = options.layout;
  out.max_depth = extent.recursion;
  out.any_depth = extent.any;
  out.most_characters = extent.characters;
  out.any_order = options.any_order;
  out.more_properties = options.more_properties;
  return out;
}

std::string cut_strings(uint32_t characters) {
  return "schema: strings of limited length have at most " + std::to_string(characters) +
         " characters, because the automaton would be too large otherwise: set a smaller "
         "maxLength, or "
         "raise limits";
}

Texts texts_of(Expressions& expressions, Document& document, const Options& options) {
  check_max_depth(options.max_depth);
  Budget& budget = expressions.budget();
  Recursion recursion(document, budget);
  std::vector<Extent> extents(std::begin(kExtents), std::end(kExtents));
  if (const auto depth = options.max_depth; depth.has_value())
    extents = {{*depth, *depth, kUnbounded}, {*depth, *depth, 1024}, {*depth, *depth, 256}};
  const double states = static_cast<double>(budget.limits().states);
  const double limit = options.most_states > 0 ? options.most_states : states / kComfort;
  const auto make = [&](const Extent& extent) {
    recursion.count(extent.recursion);
    Formulas formulas(document, recursion, budget);
    Writer writer(expressions, formulas, writer_options(options, extent));
    const Schema& root = document.root();
    const Writer::Made made =
        writer.values(formulas.of(root, true), options.level, recursion.number(*root.value));
    const std::string limits = writer.limits();
    Texts texts{made.node, document.warnings(), made.size, false,
                "schema: no value is valid by it" +
                    (limits.empty() ? "" : " within the compiler's limits: " + limits)};
    if (writer.has_cut_strings()) texts.warnings.push_back(cut_strings(extent.characters));
    return texts;
  };
  // Skips limits with which a single string is too large.
  size_t first = 0;
  const auto largest = [&] {
    for (;; ++first) {
      try {
        return make(extents[first]);
      } catch (const TooLarge&) {
        const uint32_t characters = extents[first].characters;
        while (first + 2 < extents.size() && extents[first + 1].characters == characters) ++first;
        if (first + 1 == extents.size()) throw;
      }
    }
  };
  Texts out = largest();
  if (out.size > limit) {
    Texts smallest = make(extents.back());
    smallest.is_smallest = true;
    if (smallest.size > kWorthwhile * out.size)
      out.is_smallest = true;
    else if (smallest.size <= limit || out.size > kComfort * limit)
      out = std::move(smallest);
    for (size_t i = first + 1; i + 1 < extents.size() && out.is_smallest && out.size <= limit; ++i)
      if (Texts larger = make(extents[i]); larger.size <= limit) out = std::move(larger);
  }
  // The estimated number of states may be too high. So the code rejects the schema only if the
  // estimate is more than kTooMany times the limit.
  constexpr double kTooMany = 100;
  if (out.size > kTooMany * states)
    throw Error(DLM_INVALID_ARGUMENT,
                "schema: its automaton has far more than " +
                    std::to_string(budget.limits().states) +
                    " states: make max_depth, counts or the schema smaller, or raise limits");
  if (out.node == expressions.nothing()) throw Error(DLM_INVALID_ARGUMENT, out.none);
  return out;
}

class Tree {
 public:
  Tree(Expressions& expressions, const Options& options)
      : expressions_(expressions), options_(options) {}

  Node node(const Value& value) {
    expressions_.budget().check();
    if (const Value* const text = value.find("text")) {
      value.refuse_unknown({"text"});
      return expressions_.bytes(text->string());
    }
    if (const Value* const name = value.find("token")) {
      value.refuse_unknown({"token"});
      return expressions_.bytes(kNamed + name_in(*name));
    }
    if (const Value* const schema = value.find("schema")) {
      value.refuse_unknown({"schema", "level", "name", "quote"});
      const Value* const quote = value.find("quote");
      return named(value, [&] {
        Document document(*schema, expressions_.budget());
        Options options = options_at(value);
        if (quote != nullptr) options.layout = {};
        Texts made = texts_of(expressions_, document, options);
        if (quote != nullptr) made.node = requoted(expressions_, made.node, name_in(*quote));
        return made;
      });
    }
    if (const Value* const object = value.find("json_object")) {
      value.refuse_unknown({"json_object", "level"});
      if (!object->boolean()) object->refuse("only true is known");
      return object_texts(expressions_, options_at(value)).node;
    }
    if (const Value* const expression = value.find("regex")) {
      value.refuse_unknown({"regex", "name"});
      return named(value, [&] { return Texts{regex(expressions_, expression->string()), {}}; });
    }
    if (const Value* const part = value.find("repeat")) {
      value.refuse_unknown({"repeat", "low", "high"});
      const auto [low, high] = counts(value, 0, kMostDepth);
      return expressions_.repeat(node(*part), low, high);
    }
    for (const char* const key : {"sequence", "either"}) {
      const Value* const parts = value.find(key);
      if (parts == nullptr) continue;
      value.refuse_unknown({key});
      std::vector<Node> nodes;
      for (const Value& part : parts->elements()) nodes.push_back(node(part));
      return key[0] == 's' ? expressions_.sequence(nodes) : expressions_.either(std::move(nodes));
    }
    if (const Value* const grammar_text = value.find("grammar")) {
      value.refuse_unknown({"grammar", "name"});
      return named(value, [&] {
        return Texts{grammar(expressions_, grammar_text->string(), options_.max_depth), {}};
      });
    }
    if (const Value* const schema = value.find("json_lines")) {
      value.refuse_unknown({"json_lines", "low", "high", "name"});
      return named(
          value, [&] { return lines_of(*schema, counts(value, 1, kMostLines)); }, "json_lines: ");
    }
    if (value.find("csv") != nullptr) {
      value.refuse_unknown({"csv", "header", "delimiter", "line_end", "low", "high", "name"});
      return named(value, [&] { return csv_texts(expressions_, value, options_); }, "csv: ");
    }
    if (const Value* const schema = value.find("xml")) {
      value.refuse_unknown({"xml", "name"});
      return named(value, [&] { return xml_texts(expressions_, *schema, options_); }, "xml: ");
    }
    value.refuse(
        "expected text, token, schema, json_object, regex, grammar, json_lines, csv, xml, "
        "sequence, "
        "either "
        "or repeat");
  }

  // Returns the texts of `root`, which must be the result of node().
  Texts texts(Node root) const { return {root, warnings_, size_, is_smallest_}; }

 private:
  // Returns the name of an added token.
  static const std::string& name_in(const Value& value) {
    if (value.string().empty()) value.refuse("expected the name of an added token");
    return value.string();
  }

  Options options_at(const Value& value) const {
    Options options = options_;
    if (const Value* const level = value.find("level"))
      options.level = static_cast<uint32_t>(level->integer(0, kMostNesting));
    return options;
  }

  // Returns texts that contain several values of a schema. Each value is on a separate line.
  Texts lines_of(const Value& schema, std::pair<uint32_t, uint32_t> times) {
    const auto [low, high] = times;
    Options options = options_;
    options.layout.indent = -1, options.layout.has_lines = false;
    for (const std::string& mark : {options.layout.item_separator, options.layout.key_separator})
      if (mark.find_first_of("\r\n") != std::string::npos)
        schema.refuse(
            "a line must not contain line breaks, but the JSON layout contains a line break");
    Document document(schema, expressions_.budget());
    Texts made = texts_of(expressions_, document, options);
    made.node = separated(expressions_, made.node, expressions_.bytes("\n"), low, high);
    return made;
  }

  template <typename Make>
  Node named(const Value& value, const Make& make, const std::string& what = "") {
    const Value* const name = value.find("name");
    const std::string before = (name == nullptr ? "" : name->string() + ": ") + what;
    try {
      const Texts made = make();
      for (const std::string& warning : made.warnings) warnings_.push_back(before + warning);
      size_ += made.size;
      is_smallest_ = is_smallest_ && made.is_smallest;
      return made.node;
    } catch (const Error& error) {
      throw Error(error.status(), before + error.what());
    }
  }

  Expressions& expressions_;
  const Options& options_;
  std::vector<std::string> warnings_;
  // The sum of the estimated numbers of states of all schemas.
  double size_ = 0;
  bool is_smallest_ = true;
};

}  // namespace

std::pair<uint32_t, uint32_t> counts(const Value& description, uint32_t low, int64_t most) {
  const auto count = [&](const char* key, uint32_t otherwise) {
    const Value* const found = description.find(key);
    return found == nullptr ? otherwise : static_cast<uint32_t>(found->integer(0, most));
  };
  const std::pair<uint32_t, uint32_t> made(count("low", low), count("high", kUnbounded));
  if (made.first > made.second) description.refuse("low is above high");
  return made;
}

Node separated(Expressions& expressions, Node part, Node separator, uint32_t low, uint32_t high) {
  if (high == 0) return expressions.empty();
  const Node rest = expressions.repeat(expressions.sequence(separator, part), low > 0 ? low - 1 : 0,
                                       high == kUnbounded ? kUnbounded : high - 1);
  const Node made = expressions.sequence(part, rest);
  return low == 0 ? expressions.optional(made) : made;
}

Texts schema_texts(Expressions& expressions, std::string_view schema, const Options& options) {
  Document document(schema, expressions.budget());
  return texts_of(expressions, document, options);
}

Texts object_texts(Expressions& expressions, const Options& options) {
  check_max_depth(options.max_depth);
  const uint32_t depth = options.max_depth.value_or(kExtents[0].any);
  Document document("{}", expressions.budget());
  Recursion recursion(document, expressions.budget());
  Formulas formulas(document, recursion, expressions.budget());
  Writer writer(expressions, formulas, writer_options(options, {0, depth, kUnbounded}));
  return {writer.any_object(options.level).node, {}};
}

Texts listed_texts(Expressions& expressions, std::string_view list) {
  constexpr const char* kExpected = "enum: give a list of texts that are not empty";
  std::unique_ptr<const Value> found;
  try {
    found = json::parse(list, kMostTree);
  } catch (const Error& error) {
    throw Error(DLM_INVALID_ARGUMENT, std::string(kExpected) + " (" + error.what() + ")");
  }
  if (found->kind() != Value::Kind::array || found->elements().empty())
    throw Error(DLM_INVALID_ARGUMENT, kExpected);
  std::vector<Node> nodes;
  for (const Value& each : found->elements()) {
    if (each.kind() != Value::Kind::string || each.string().empty())
      throw Error(DLM_INVALID_ARGUMENT, kExpected);
    nodes.push_back(expressions.bytes(each.string()));
  }
  return {expressions.either(std::move(nodes)), {}};
}

Texts tree_texts(Expressions& expressions, std::string_view tree, const Options& options) {
  std::unique_ptr<const Value> root;
  Tree made(expressions, options);
  try {
    root = json::parse(tree, kMostTree, kMostNesting);
    return made.texts(made.node(*root));
  } catch (const Error& error) {
    if (error.status() != DLM_BAD_BUNDLE) throw;
    throw Error(DLM_INVALID_ARGUMENT, std::string("tree: ") + error.what());
  }
}

}  // namespace dlm::compile::schema
