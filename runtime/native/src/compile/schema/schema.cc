#include "compile/schema/schema.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "compile/grammar.h"
#include "compile/regex.h"
#include "compile/schema/records.h"
#include "compile/schema/writer.h"

namespace dlm::compile::schema {
namespace {

using json::Value;

constexpr uint32_t kMostDepth = 10'000;  // of max_depth
constexpr size_t kMostTree = 16 << 20;   // bytes of a tree's text
constexpr int kMostNesting = 300;        // of its JSON
constexpr int64_t kMostLines = 1'000'000;

struct Depths {
  uint32_t recursion, any;
};
// The depths to try until the automaton looks small enough.
constexpr Depths kDepths[] = {{3, 3}, {2, 3}, {2, 2}, {1, 2}, {1, 1}, {0, 1}};

void check_depth(const Options& options) {
  if (options.max_depth.has_value() && *options.max_depth > kMostDepth)
    fail(DLM_INVALID_ARGUMENT, "max_depth: give an integer from 0 to %u, not %u", kMostDepth,
         *options.max_depth);
}

WriterOptions writer_options(const Options& options, const Depths& depths) {
  return {options.layout, depths.recursion, depths.any, options.any_order, options.more_properties};
}

Texts texts_of(Expressions& expressions, Document& document, const Options& options) {
  check_depth(options);
  Budget& budget = expressions.budget();
  Recursion recursion(document, budget);
  std::vector<Depths> depths(std::begin(kDepths), std::end(kDepths));
  if (options.max_depth.has_value()) depths = {{*options.max_depth, *options.max_depth}};
  Writer::Made made;
  for (const Depths& each : depths) {
    recursion.count(each.recursion);
    Formulas formulas(document, recursion, budget);
    Writer writer(expressions, formulas, writer_options(options, each));
    const Schema& root = document.root();
    made = writer.values(formulas.of(root, true), options.level, recursion.number(*root.value));
    if (made.size <= static_cast<double>(budget.limits().states)) break;
  }
  // Far too large, though the estimate may be too high.
  constexpr double kTooMany = 100;
  if (made.size > kTooMany * static_cast<double>(budget.limits().states))
    throw Error(DLM_INVALID_ARGUMENT,
                "schema: its automaton has far more than " +
                    std::to_string(budget.limits().states) +
                    " states: make max_depth, counts or the schema smaller, or raise limits");
  if (made.node == expressions.nothing())
    throw Error(DLM_INVALID_ARGUMENT,
                "schema: no value is valid by it" +
                    (options.max_depth.has_value()
                         ? " within max_depth " + std::to_string(*options.max_depth)
                         : ""));
  return {made.node, document.warnings()};
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
    if (const Value* const schema = value.find("schema")) {
      value.refuse_unknown({"schema", "level", "name"});
      return named(value, [&] {
        Document document(*schema, expressions_.budget());
        return texts_of(expressions_, document, options_at(value));
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
        "expected text, schema, json_object, regex, grammar, json_lines, csv, xml, sequence, "
        "either "
        "or repeat");
  }

  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  Options options_at(const Value& value) const {
    Options options = options_;
    if (const Value* const level = value.find("level"))
      options.level = static_cast<uint32_t>(level->integer(0, kMostNesting));
    return options;
  }

  // Values of a schema, each on its own line, with a line break between them.
  Texts lines_of(const Value& schema, std::pair<uint32_t, uint32_t> times) {
    const auto [low, high] = times;
    Options options = options_;
    options.layout.indent = -1, options.layout.has_lines = false;
    for (const std::string& mark : {options.layout.item_separator, options.layout.key_separator})
      if (mark.find_first_of("\r\n") != std::string::npos)
        schema.refuse("a line has no line breaks, and the JSON layout has one");
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
      return made.node;
    } catch (const Error& error) {
      throw Error(error.status(), before + error.what());
    }
  }

  Expressions& expressions_;
  const Options& options_;
  std::vector<std::string> warnings_;
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
  check_depth(options);
  const uint32_t depth = options.max_depth.value_or(kDepths[0].any);
  Document document("{}", expressions.budget());
  Recursion recursion(document, expressions.budget());
  Formulas formulas(document, recursion, expressions.budget());
  Writer writer(expressions, formulas, writer_options(options, {0, depth}));
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
    const Node node = made.node(*root);
    return {node, made.warnings()};
  } catch (const Error& error) {
    if (error.status() != DLM_BAD_BUNDLE) throw;
    throw Error(DLM_INVALID_ARGUMENT, std::string("tree: ") + error.what());
  }
}

}  // namespace dlm::compile::schema
