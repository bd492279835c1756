// Builds the formula of a schema, or of its negation, from the keywords of the schema.
#include <string_view>
#include <tuple>

#include "compile/schema/formula.h"
#include "compile/schema/keywords.h"

namespace dlm::compile::schema {

using json::Value;

Formula Formulas::of(const Schema& schema, bool positive) {
  constexpr size_t kMostOpen = 250;
  if (schema.is_boolean()) return schema.value->boolean() == positive ? kYes : kNo;
  auto& made = positive ? positive_ : negative_;
  const auto found = made.find(&schema);
  if (found != made.end()) return found->second;
  if (open_.size() >= kMostOpen)
    throw Error(DLM_INVALID_ARGUMENT, "schema: its parts are nested too deep");
  if (!open_.insert(&schema).second)
    throw Error(DLM_INVALID_ARGUMENT,
                "schema: " + document_.place(*schema.value) +
                    ": this schema refers to itself without a property or an item in between");
  const Formula written_ = written(schema, positive);
  open_.erase(&schema);
  return made[&schema] = written_;
}

Formula Formulas::written(const Schema& schema, bool positive) {
  std::vector<Formula> out;
  // Up to Draft 7, the specification says that validators ignore all other keywords in a schema
  // that contains $ref. But many schemas contain such keywords, and many validators obey them. So
  // the formula for valid values requires that a value satisfies these keywords. A value that
  // violates only these keywords is not certainly invalid, so the formula for invalid values
  // ignores them.
  const bool hides_siblings = !positive && schema.draft() <= kDraft7 && schema[Keyword::ref];
  if (hides_siblings) return reference(schema, Keyword::ref, false);
  if (const Value* const types = schema[Keyword::type]) {
    uint8_t kinds = 0;
    const auto add_kind = [&](const std::string& name) {
      static const std::unordered_map<std::string_view, uint8_t> kBits = {
          {"null", kNull},     {"boolean", kBoolean}, {"integer", kInteger}, {"number", kNumber},
          {"string", kString}, {"array", kArray},     {"object", kObject}};
      kinds = static_cast<uint8_t>(kinds | kBits.at(name));
    };
    if (types->kind() == Value::Kind::string) {
      add_kind(types->string());
    } else {
      for (const Value& each : types->elements()) add_kind(each.string());
    }
    out.push_back(type(positive ? kinds : static_cast<uint8_t>(kAllKinds & ~kinds),
                       schema.draft() == kDraft4));
  }
  for (const Keyword keyword : {Keyword::enum_, Keyword::const_}) {
    if (schema[keyword] != nullptr && (positive || is_of_draft(schema, keyword)))
      out.push_back(values(schema, keyword, positive));
  }
  numbers_of(schema, positive, out);
  strings_of(schema, positive, out);
  arrays_of(schema, positive, out);
  objects_of(schema, positive, out);
  applied_of(schema, positive, out);
  dependencies_of(schema, positive, out);
  for (const auto& [keyword, kind, type_] :
       {std::tuple{Keyword::unevaluated_items, Atom::unevaluated_items, uint8_t{kArray}},
        std::tuple{Keyword::unevaluated_properties, Atom::unevaluated_properties,
                   uint8_t{kObject}}}) {
    if (schema[keyword] == nullptr) continue;
    if (positive) {
      out.push_back(atom(kind, schema, type_));
    } else if (is_of_draft(schema, keyword)) {
      out.push_back(rejected(schema, keyword, type_));
    }
  }
  return positive ? all(out) : any(out);
}

void Formulas::numbers_of(const Schema& schema, bool positive, std::vector<Formula>& out) {
  const auto bound = [&](const Value& number, bool is_low, bool is_excluded) {
    Term term;
    term.number = Decimal::parse(number.written());
    const bool is_at_least = is_low == positive;
    term.high = is_at_least ? 0 : 1;
    term.low = is_excluded == positive ? 1 : 0;
    const Formula found = atom(Atom::bound, schema, kNumber, std::move(term));
    out.push_back(positive ? found : all({type(kNumber), found}));
  };
  for (const bool is_low : {true, false}) {
    const Value* const limit = schema[is_low ? Keyword::minimum : Keyword::maximum];
    const Value* const excluded =
        schema[is_low ? Keyword::exclusive_minimum : Keyword::exclusive_maximum];
    const bool is_boolean = excluded != nullptr && excluded->kind() == Value::Kind::boolean;
    if (limit != nullptr) bound(*limit, is_low, is_boolean && excluded->boolean());
    if (excluded != nullptr && !is_boolean) bound(*excluded, is_low, true);
  }
  if (const Value* const multiple = schema[Keyword::multiple_of]) {
    Term term;
    term.number = Decimal::parse(multiple->written());
    term.positive = positive;
    const Formula found = atom(Atom::multiple, schema, kNumber, std::move(term));
    out.push_back(positive ? found : all({type(kNumber), found}));
  }
}

void Formulas::strings_of(const Schema& schema, bool positive, std::vector<Formula>& out) {
  if (schema[Keyword::min_length] != nullptr || schema[Keyword::max_length] != nullptr)
    out.push_back(range(Atom::length, schema, kString, count(schema, Keyword::min_length, 0),
                        count(schema, Keyword::max_length, kNoLimit), positive));
  if (const Value* const pattern = schema[Keyword::pattern]) {
    Term term;
    term.text = pattern->string(), term.positive = positive;
    const Formula found = atom(Atom::pattern, schema, kString, std::move(term));
    out.push_back(positive ? found : all({type(kString), found}));
  }
  // Some validators ignore formats, so a string that violates a format is not certainly invalid.
  if (const Value* const format = schema[Keyword::format]; format != nullptr && positive) {
    Term term;
    term.text = format->string();
    out.push_back(atom(Atom::format, schema, kString, std::move(term)));
  }
}

void Formulas::arrays_of(const Schema& schema, bool positive, std::vector<Formula>& out) {
  if (schema[Keyword::min_items] != nullptr || schema[Keyword::max_items] != nullptr)
    out.push_back(range(Atom::item_count, schema, kArray, count(schema, Keyword::min_items, 0),
                        count(schema, Keyword::max_items, kNoLimit), positive));
  if (const Value* const unique = schema[Keyword::unique_items]) {
    if (!unique->boolean()) {
      if (positive) out.push_back(range(Atom::item_count, schema, kArray, 0, kNoLimit, true));
    } else {
      out.push_back(positive ? atom(Atom::unique, schema, kArray)
                             : rejected(schema, Keyword::unique_items, kArray));
    }
  }
  const auto matches = [&](const Value& inner, bool is_valid, uint64_t low, uint64_t high,
                           uint64_t first) {
    Term term;
    term.low = low, term.high = high, term.first = first, term.inner = is_valid;
    return atom(Atom::matches, document_.schema(inner), kArray, std::move(term));
  };
  const ItemSchemas items = item_schemas(schema);
  const bool is_ignored = schema[Keyword::items] == nullptr &&
                          schema[Keyword::prefix_items] == nullptr &&
                          schema[Keyword::additional_items] != nullptr;
  if (positive && (items.prefix != nullptr || items.others != nullptr || is_ignored))
    out.push_back(atom(Atom::items, schema, kArray));
  if (!positive) {
    for (size_t i = 0; i < items.count(); ++i) {
      Term term;
      term.low = i, term.inner = false;
      out.push_back(
          all({range(Atom::item_count, schema, kArray, i + 1, kNoLimit, true), type(kArray),
               atom(Atom::item, document_.schema(items.prefix->elements()[i]), kArray,
                    std::move(term))}));
    }
    if (items.others != nullptr)
      out.push_back(all({type(kArray), matches(*items.others, false, 1, kNoLimit, items.count())}));
  }
  const Value* const contains = schema[Keyword::contains];
  if (contains == nullptr || (!positive && !is_of_draft(schema, Keyword::contains))) return;
  uint64_t low = 1, high = kNoLimit;
  if (is_of_draft(schema, Keyword::min_contains)) {
    low = count(schema, Keyword::min_contains, 1);
    high = count(schema, Keyword::max_contains, kNoLimit);
  }
  if (positive) {
    out.push_back(matches(*contains, true, low, high, 0));
    return;
  }
  std::vector<Formula> outside;
  if (low > 0) outside.push_back(matches(*contains, true, 0, low - 1, 0));
  if (high != kNoLimit) outside.push_back(matches(*contains, true, high + 1, kNoLimit, 0));
  out.push_back(all({type(kArray), any(outside)}));
}

void Formulas::objects_of(const Schema& schema, bool positive, std::vector<Formula>& out) {
  const Value* const properties = schema[Keyword::properties];
  const Value* const patterns = schema[Keyword::pattern_properties];
  const Value* const others = schema[Keyword::additional_properties];
  if (positive && (properties != nullptr || patterns != nullptr || others != nullptr))
    out.push_back(atom(Atom::members, schema, kObject));
  if (!positive && properties != nullptr) {
    for (const Value& each : properties->members()) {
      out.push_back(all({type(kObject), has(each.key(), true, &schema),
                         member(each.key(), document_.schema(each))}));
    }
  }
  if (!positive && (patterns != nullptr || others != nullptr))
    out.push_back(all({type(kObject), atom(Atom::violates, schema, kObject)}));
  if (const Value* const required = schema[Keyword::required]) {
    if (positive) out.push_back(range(Atom::property_count, schema, kObject, 0, kNoLimit, true));
    for (const Value& name : required->elements()) {
      const Formula found = has(name.string(), positive, &schema);
      out.push_back(positive ? found : all({type(kObject), found}));
    }
  }
  if (schema[Keyword::min_properties] != nullptr || schema[Keyword::max_properties] != nullptr)
    out.push_back(range(Atom::property_count, schema, kObject,
                        count(schema, Keyword::min_properties, 0),
                        count(schema, Keyword::max_properties, kNoLimit), positive));
  if (schema[Keyword::property_names] != nullptr &&
      (positive || is_of_draft(schema, Keyword::property_names)))
    out.push_back(positive ? atom(Atom::names, schema, kObject)
                           : rejected(schema, Keyword::property_names, kObject));
}

void Formulas::dependencies_of(const Schema& schema, bool positive, std::vector<Formula>& out) {
  for (const Keyword keyword :
       {Keyword::dependent_required, Keyword::dependent_schemas, Keyword::dependencies}) {
    if (schema[keyword] == nullptr || (!positive && !is_of_draft(schema, keyword))) continue;
    if (positive) out.push_back(range(Atom::property_count, schema, kObject, 0, kNoLimit, true));
    for (const Value& each : schema[keyword]->members()) {
      Formula then = kYes;
      if (each.kind() == Value::Kind::array) {
        std::vector<Formula> names;
        for (const Value& name : each.elements())
          names.push_back(has(name.string(), positive, &schema));
        then = positive ? all(names) : any(names);
      } else {
        then = of(document_.schema(each), positive);
      }
      out.push_back(positive ? any({has(each.key(), false, &schema), then})
                             : all({type(kObject), has(each.key(), true, &schema), then}));
    }
  }
}

Formula Formulas::reference(const Schema& schema, Keyword keyword, bool positive) {
  const Schema& target = document_.target(schema, keyword);
  const uint32_t number = recursion_.number(*target.value);
  const Formula found = of(target, positive);
  if (number == kNotCounted) return found;
  Term term;
  term.low = number;
  return all({atom(Atom::enter, target, 0, std::move(term)), found});
}

void Formulas::applied_of(const Schema& schema, bool positive, std::vector<Formula>& out) {
  for (const Keyword keyword : {Keyword::ref, Keyword::dynamic_ref, Keyword::recursive_ref}) {
    if (schema[keyword] != nullptr && (positive || is_of_draft(schema, keyword)))
      out.push_back(reference(schema, keyword, positive));
  }
  const auto child = [&](const Value& value, bool is_valid) {
    return of(document_.schema(value), is_valid);
  };
  for (const Keyword keyword : {Keyword::all_of, Keyword::any_of}) {
    if (schema[keyword] == nullptr) continue;
    std::vector<Formula> branches;
    for (const Value& each : schema[keyword]->elements()) branches.push_back(child(each, positive));
    out.push_back((keyword == Keyword::all_of) == positive ? all(branches) : any(branches));
  }
  if (const Value* const branches = schema[Keyword::one_of]) {
    std::vector<Formula> pairs, valid, invalid;
    for (const Value& each : branches->elements()) {
      valid.push_back(child(each, true)), invalid.push_back(child(each, false));
      pairs.push_back(valid.back()), pairs.push_back(invalid.back());
    }
    out.push_back(positive ? one(pairs) : any({all(invalid), several(valid, 0, valid.size())}));
  }
  if (const Value* const inner = schema[Keyword::not_]) out.push_back(child(*inner, !positive));
  const Value *const if_ = schema[Keyword::if_], *const then = schema[Keyword::then_],
                     *const otherwise = schema[Keyword::else_];
  if (if_ == nullptr || (then == nullptr && otherwise == nullptr)) return;
  if (!positive && !is_of_draft(schema, Keyword::if_)) return;
  const Formula empty = positive ? kYes : kNo;
  out.push_back(
      any({all({child(*if_, true), then == nullptr ? empty : child(*then, positive)}),
           all({child(*if_, false), otherwise == nullptr ? empty : child(*otherwise, positive)})}));
}

}  // namespace dlm::compile::schema
