#include "compile/schema/writer.h"

#include <algorithm>

namespace dlm::compile::schema {
namespace {

constexpr uint32_t kMostLevels = 200;  // largest nesting depth of values
constexpr size_t kMostSplits = 4096;   // largest number of splits of a formula without a type
constexpr double kSizeOfString = 10, kSizeOfNumber = 12, kSizeOfCharacter = 10;

}  // namespace

Writer::Writer(Expressions& expressions, Formulas& formulas, const WriterOptions& options)
    : expressions_(expressions),
      formulas_(formulas),
      document_(formulas.document()),
      holds_(expressions, formulas),
      options_(options) {}

Writer::Made Writer::values(Formula formula, uint32_t level, uint32_t root) {
  Place place{level, {}};
  if (root != kNotCounted) place.counts.emplace_back(root, 1);
  return value(formula, place, true);
}

Writer::Made Writer::either(const std::vector<Made>& some) {
  std::vector<Node> nodes;
  double size = 0;
  for (const Made& each : some) nodes.push_back(each.node), size += each.size;
  return {expressions_.either(std::move(nodes)), size};
}

// Builds the node for all JSON values up to the nesting depth any_depth. `level` is the number of
// containers around the value. `around` is the number of these containers that the schema does not
// constrain.
Writer::Made Writer::anything(uint32_t level, uint32_t around) {
  const uint32_t depth = options_.any_depth > around ? options_.any_depth - around : 0;
  const std::pair<uint32_t, uint32_t> key{options_.layout.kind_of_level(level), depth};
  const auto known = any_.find(key);
  if (known != any_.end()) return known->second;
  constexpr uint32_t kMostDepth = 100;
  if (depth > kMostDepth)
    throw Error(
        DLM_INVALID_ARGUMENT,
        "max_depth " + std::to_string(options_.any_depth) +
            " is too large for values that the schema does not constrain: the default is 3");
  const Node scalar = expressions_.either({any_string(expressions_), any_number(expressions_),
                                           expressions_.bytes("true"), expressions_.bytes("false"),
                                           expressions_.bytes("null")});
  Made made{scalar, kSizeOfString + kSizeOfNumber + 8};
  if (depth > 0) {
    const Made inner = anything(level + 1, around + 1);
    const Node pair = expressions_.sequence(
        {any_string(expressions_), expressions_.bytes(options_.layout.key_separator), inner.node});
    const auto around_items = options_.layout.around(level, true);
    const auto around_pairs = options_.layout.around(level, false);
    made.node = expressions_.either(
        {scalar, container(expressions_, around_pairs, false, pair, 0, kUnbounded),
         container(expressions_, around_items, true, inner.node, 0, kUnbounded)});
    made.size += 2 * inner.size + kSizeOfString;
  }
  return any_[key] = made;
}

Writer::Made Writer::any_object(uint32_t level) {
  const Made inner = anything(level + 1, 1);
  const Node pair = expressions_.sequence(
      {any_string(expressions_), expressions_.bytes(options_.layout.key_separator), inner.node});
  return {container(expressions_, options_.layout.around(level, false), false, pair, 0, kUnbounded),
          inner.size + kSizeOfString};
}

std::string Writer::limits() const {
  std::string out;
  for (const std::string& limit : limits_) out += (out.empty() ? "" : "; ") + limit;
  return out;
}

Formula Writer::entered(Formula formula, const Counts& counts) {
  const Formula made = formulas_.entered(formula, counts, options_.max_depth);
  if (made == Formulas::kNo && formula != Formulas::kNo)
    limits_.insert("max_depth " + std::to_string(options_.max_depth));
  return made;
}

// Builds the node for all values for which a formula is true. `is_described` is true if the value
// has a schema, even if this schema allows all values.
Writer::Made Writer::value(Formula formula, const Place& place, bool is_described) {
  formula = entered(formula, place.counts);
  if (formula == Formulas::kNo) return {};
  if (formula == Formulas::kYes) return anything(place.level, is_described ? 0 : 1);
  std::string key(reinterpret_cast<const char*>(&formula), sizeof formula);
  const uint32_t level = options_.layout.kind_of_level(place.level);
  key.append(reinterpret_cast<const char*>(&level), sizeof level);
  Place here{place.level, {}};
  const std::vector<uint32_t>& numbers = formulas_.numbers(formula);
  for (const auto& [number, count] : place.counts) {
    if (!std::binary_search(numbers.begin(), numbers.end(), number)) continue;
    here.counts.emplace_back(number, count);
    key.append(reinterpret_cast<const char*>(&number), sizeof number);
    key.append(reinterpret_cast<const char*>(&count), sizeof count);
  }
  const auto known = made_.find(key);
  if (known != made_.end()) return known->second;
  expressions_.budget().check_time();
  if (++depth_ > kMostLevels)
    throw Error(DLM_INVALID_ARGUMENT,
                "schema: its parts are nested too deep: make max_depth or the schema smaller");
  const Made made = written(formula, here);
  --depth_;
  return made_[std::move(key)] = made;
}

Writer::Made Writer::written(Formula formula, const Place& place) {
  const std::vector<Formula> parts = formulas_.conjuncts(formula);
  const Term& term = formulas_[formula];
  uint8_t kinds = term.kinds;
  if (!term.is_typed) {
    // If the schema does not contain a type, the writer allows only values of the types to which
    // the schema's keywords apply. For example, it allows only strings for {"minLength": 2}. The
    // code handles each branch of a choice separately, because the keywords of different branches
    // may apply to different types.
    size_t splits = 1, at = parts.size();
    for (size_t i = parts.size(); i-- > 0;) {
      const Op op = formulas_[parts[i]].op;
      if (op != Op::any && op != Op::one) continue;
      at = i;
      const size_t count = formulas_[parts[i]].parts.size() / (op == Op::one ? 2 : 1);
      if (splits <= kMostSplits) splits *= std::max<size_t>(count, 1);
    }
    if (at < parts.size() && splits <= kMostSplits) {
      std::vector<Formula> rest = parts;
      rest.erase(rest.begin() + static_cast<ptrdiff_t>(at));
      std::vector<Made> made;
      const std::vector<Formula> branches = formulas_.alternatives(parts[at]);
      for (const Formula branch : branches) {
        rest.push_back(branch);
        made.push_back(value(formulas_.all(rest), place, true));
        rest.pop_back();
      }
      return either(made);
    }
    if (term.speaks_of != 0 && (kinds & ~term.speaks_of) != 0) {
      kinds = static_cast<uint8_t>(kinds & term.speaks_of);
      limits_.insert("a schema without 'type' has only values of the types of its keywords");
    }
  }
  std::vector<Made> made;
  for (const uint8_t type : {kString, kNumber, kArray, kObject, kBoolean, kNull}) {
    if ((kinds & type) == 0) continue;
    const Formula found = formulas_.restricted(formula, type);
    if (found == Formulas::kNo) continue;
    if (type == kArray || type == kObject) {
      made.push_back(container_values(found, type, place));
    } else {
      const ValueSet* const set = formulas_.listed(found);
      double size = type == kNumber ? kSizeOfNumber : kSizeOfString;
      if (set != nullptr) {
        for (const std::string& each : set->keys) size += static_cast<double>(each.size());
      }
      const Node node = scalar(found, type);
      const bool is_machine = expressions_.kind(node) == Expressions::Kind::machine;
      if (is_machine) size = static_cast<double>(expressions_.automaton(node).states());
      uint64_t characters = 0;
      for (const Formula part : formulas_.conjuncts(found)) {
        const Term& each = formulas_[part];
        if (is_machine || each.op != Op::atom || each.atom != Atom::length) continue;
        const uint64_t high = std::min<uint64_t>({each.high, 10'000, options_.most_characters});
        characters += each.high != kNoLimit ? std::max(each.low, high) : each.low;
      }
      size += kSizeOfCharacter * static_cast<double>(characters);
      made.push_back({node, size});
    }
  }
  return either(made);
}

}  // namespace dlm::compile::schema
