#include "compile/schema/described.h"

#include <algorithm>

#include "base/error.h"
#include "compile/automata/depths.h"
#include "compile/automata/numbers.h"
#include "compile/schema/quotes.h"

namespace dlm::compile::schema {
namespace {

using json::Value;

// The longest chain of references that the code follows.
constexpr int kMostReferences = 100;

Recursion counted(Document& document, Budget& budget, const Options& options) {
  Recursion made(document, budget);
  made.count(options.max_depth.value_or(kUsualDepth));
  return made;
}

}  // namespace

Described::Described(Expressions& expressions, const Value& schema, const Options& options,
                     const char* format)
    : expressions_(expressions),
      automata_(expressions),
      document_(schema, expressions.budget()),
      recursion_(counted(document_, expressions.budget(), options)),
      formulas_(document_, recursion_, expressions.budget()),
      writer_(expressions, formulas_, {}),
      format_(format) {}

void Described::refuse(const Schema& at, const std::string& why) {
  throw Error(DLM_INVALID_ARGUMENT, document_.place(*at.value) + ": " + why);
}

const Schema& Described::resolved(const Schema& schema) {
  const Schema* at = &schema;
  for (int i = 0; (*at)[Keyword::ref] != nullptr; ++i) {
    if (i == kMostReferences) refuse(schema, "$ref leads to too many others");
    allow(*at, {Keyword::ref});
    at = &document_.target(*at, Keyword::ref);
  }
  return *at;
}

bool Described::is_of_type(const Schema& resolved, std::string_view type) {
  const Value* const found = resolved[Keyword::type];
  return found != nullptr && found->kind() == Value::Kind::string && found->string() == type;
}

void Described::allow(const Schema& schema, std::initializer_list<Keyword> keywords) {
  // Keyword::schema and the keywords after it, such as $id, do not constrain values. So the loop
  // does not test these keywords.
  for (size_t i = 0; i < static_cast<size_t>(Keyword::schema); ++i) {
    const auto keyword = static_cast<Keyword>(i);
    if (schema[keyword] != nullptr &&
        std::find(keywords.begin(), keywords.end(), keyword) == keywords.end())
      document_.refuse(schema, keyword, std::string("is not supported here in ") + format_);
  }
}

std::vector<Property> Described::properties(const Schema& object) {
  allow(object, {Keyword::type, Keyword::properties, Keyword::required,
                 Keyword::additional_properties, Keyword::unevaluated_properties});
  const Value* const listed = object[Keyword::properties];
  const Value* const required = object[Keyword::required];
  if (listed == nullptr || listed->members().empty()) refuse(object, "it has no properties");
  std::vector<Property> made;
  for (const Value& each : listed->members())
    made.push_back({each.key(), &document_.schema(each), false});
  if (required != nullptr && required->kind() == Value::Kind::array) {
    for (const Value& name : required->elements()) {
      expressions_.budget().check();
      const auto found = std::find_if(made.begin(), made.end(), [&](const Property& each) {
        return each.name == name.string();
      });
      if (found == made.end())
        document_.refuse(object, Keyword::required,
                         "names " + shown(name) + ", which is not one of the properties");
      found->is_required = true;
    }
  }
  return made;
}

Node Described::scalars(const Schema& schema) {
  const Formula formula = formulas_.of(schema, true);
  for (const uint8_t type : {kArray, kObject})
    if (formulas_.restricted(formula, type) != Formulas::kNo)
      refuse(schema, std::string(format_) +
                         " has only strings, numbers, booleans and null here: give it such a type");
  const Node json = writer_.values(formula, 0, kNotCounted).node;
  ByteSet all;
  all.set();
  const Node any = expressions_.repeat(expressions_.set(all), 0, kUnbounded);
  const Node is_string = expressions_.sequence(expressions_.bytes("\""), any);
  const Node strings = expressions_.machine(
      unquoted(automata_.of(expressions_.both(json, is_string)), expressions_.budget()));
  Node others = expressions_.without(json, is_string);
  if (automata_.of(others).matches("null"))
    others = expressions_.either(expressions_.without(others, expressions_.bytes("null")),
                                 expressions_.empty());
  return expressions_.either(strings, others);
}

Texts Described::texts(Node node) {
  if (automata_.is_empty(node))
    throw Error(DLM_INVALID_ARGUMENT, "no value is valid by the schema");
  return {node, document_.warnings()};
}

Node respelled(Expressions& expressions, Automata& automata, Node node,
               const Spellings& spellings) {
  const ByteAutomaton& from = automata.of(node);
  if (from.is_empty()) return expressions.nothing();
  using Edges = std::vector<ByteEdge>;
  std::vector<Edges> states(from.states());
  for (size_t state = 0; state < from.states(); ++state) {
    expressions.budget().check();
    for (uint32_t e = from.starts[state]; e < from.starts[state + 1]; ++e) {
      int low = from.edges[e].low;
      const int32_t to = from.edges[e].state;
      for (int byte = low; byte <= from.edges[e].high + 1; ++byte) {
        const auto spelling = std::find_if(spellings.begin(), spellings.end(),
                                           [&](const auto& each) { return each.first == byte; });
        const bool is_last = byte > from.edges[e].high;
        if (!is_last && spelling == spellings.end()) continue;
        if (low < byte)
          states[state].push_back({static_cast<uint8_t>(low), static_cast<uint8_t>(byte - 1), to});
        low = byte + 1;
        if (is_last) break;
        size_t at = state;
        const std::string_view text = spelling->second;
        for (size_t i = 0; i < text.size(); ++i) {
          const auto letter = static_cast<uint8_t>(text[i]);
          const auto there = std::find_if(states[at].begin(), states[at].end(),
                                          [&](const ByteEdge& each) { return each.low == letter; });
          if (there != states[at].end()) {
            at = index(there->state);
            continue;
          }
          const bool is_end = i + 1 == text.size();
          const auto next = is_end ? to : static_cast<int32_t>(states.size());
          states[at].push_back({letter, letter, next});
          if (is_end) break;
          at = states.size();
          states.emplace_back();
        }
      }
    }
  }
  ByteAutomaton made;
  made.accepting = from.accepting;
  made.accepting.resize(states.size(), 0);
  for (Edges& edges : states) {
    std::sort(edges.begin(), edges.end(),
              [](const ByteEdge& one, const ByteEdge& other) { return one.low < other.low; });
    made.starts.push_back(static_cast<uint32_t>(made.edges.size()));
    for (const ByteEdge& each : edges) append_edge(made, each.low, each.high, each.state);
  }
  made.starts.push_back(static_cast<uint32_t>(made.edges.size()));
  return expressions.machine(made);
}

}  // namespace dlm::compile::schema
