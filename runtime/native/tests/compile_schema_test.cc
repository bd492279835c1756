// Tests of the parser of JSON Schemas: the texts that schemas accept, the error messages for
// invalid schemas, and the cost of hostile schemas.
#include <cstdio>
#include <string>
#include <vector>

#include "base/error.h"
#include "compile/automata/automata.h"
#include "compile/schema/schema.h"

namespace {

using namespace dlm;
using namespace dlm::compile;

int failures = 0;

void expect(bool is_right, const std::string& what) {
  if (is_right) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.substr(0, 300).c_str());
}

Limits limits() {
  Limits made;
  made.seconds = 20;
  made.memory_bytes = size_t{512} << 20;
  return made;
}

void check(const std::string& schema, const std::vector<std::string>& valid,
           const std::vector<std::string>& invalid, const schema::Options& options = {}) {
  Budget budget(limits(), "schema");
  Expressions expressions(budget);
  try {
    Automata automata(expressions);
    const ByteAutomaton& texts =
        automata.of(schema::schema_texts(expressions, schema, options).node);
    for (const std::string& text : valid)
      expect(texts.matches(text), schema + " should accept " + text);
    for (const std::string& text : invalid)
      expect(!texts.matches(text), schema + " should not accept " + text);
  } catch (const Error& error) {
    expect(false, schema + ": " + error.what());
  }
}

// Expects that compiling throws an Error whose message contains `part`. If `part` is "", compiling
// may also succeed.
void refuse(const std::string& schema, const std::string& part) {
  Budget budget(limits(), "schema");
  Expressions expressions(budget);
  try {
    Automata automata(expressions);
    automata.of(schema::schema_texts(expressions, schema, {}).node);
    expect(part.empty(), schema + " should be refused");
  } catch (const Error& error) {
    expect(error.status() == DLM_INVALID_ARGUMENT, schema + ": status");
    expect(std::string(error.what()).find(part) != std::string::npos, schema + ": " + error.what());
  }
}

std::string repeated(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

void accepts_what_is_valid() {
  check(R"({"type":"integer","minimum":3})", {"3", "10"}, {"2", "3.5", "x"});
  check(R"({"properties":{"a":{"const":1},"b":{"type":"null"}},"required":["b"]})",
        {R"({"b":null})", R"({"a":1,"b":null})"}, {"{}", R"({"b":null,"a":1})", R"({"a":1})"});
  check(R"({"type":"integer","oneOf":[{"minimum":3},{"maximum":5}]})", {"2", "6"}, {"3", "5"});
  check(R"({"type":"string","not":{"pattern":"^a"}})", {R"("b")", R"("")"}, {R"("a")", R"("ab")"});
  check(R"({"properties":{"a":{"const":1},"b":{"const":1}},"dependentRequired":{"a":["b"]}})",
        {"{}", R"({"b":1})", R"({"a":1,"b":1})"}, {R"({"a":1})"});
  check(R"({"type":"array","items":{"enum":[1,2]},"uniqueItems":true})", {"[]", "[2,1]"},
        {"[1,1]"});
  check(
      R"({"$ref":"#/$defs/n","$defs":{"n":{"type":"object","properties":{"n":{"$ref":"#/$defs/n"}}}}})",
      {"{}", R"({"n":{}})"}, {R"({"n":1})"});
  schema::Options options;
  options.any_order = true;
  check(R"({"properties":{"a":{"const":1},"b":{"const":2}},"required":["a","b"]})",
        {R"({"b":2,"a":1})", R"({"a":1,"b":2})"}, {R"({"a":1})", R"({"a":1,"b":2,"a":1})"},
        options);
  options = {};
  options.layout.indent = 2, options.layout.key_separator = ": ";
  check(R"({"type":"array","items":{"const":{"a":1}}})", {"[]", "[\n  {\n    \"a\": 1\n  }\n]"},
        {"[{\"a\":1}]"}, options);
}

void refuses_by_name() {
  refuse("5", "is not a schema");
  refuse("{", "schema: not JSON");
  refuse(R"({"type":"objct"})", "#/type: \"objct\" is not a type");
  refuse(R"({"properties":{"a":{"$ref":"#/x"}}})", "#/properties/a: $ref \"#/x\" leads nowhere");
  refuse(R"({"$ref":"http://x/y"})", "never retrieved");
  refuse(R"({"allOf":[{"$ref":"#"}]})", "refers to itself without");
  refuse(R"({"type":"string","minLength":20000})", "keyword 'minLength' = 20000");
  refuse(R"({"properties":{"a":{"$ref":"#"}},"required":["a"]})", "no value is valid");
}

void survives_hostile_schemas() {
  refuse(repeated("[", 100'000), "schema: not JSON");
  refuse(repeated(R"({"not":)", 120) + "{}" + repeated("}", 120), "");
  refuse(repeated(R"({"items":)", 250) + "{}" + repeated("}", 250), "");
  std::string chain = R"({"$ref":"#/$defs/0","$defs":{)", doubled = chain;
  for (int i = 0; i < 2000; ++i) {
    const std::string name = '"' + std::to_string(i) + '"', next = std::to_string(i + 1);
    chain += name + R"(:{"$ref":"#/$defs/)" + next + R"("},)";
    if (i < 60)
      doubled += name + R"(:{"properties":{"a":{"$ref":"#/$defs/)" + next +
                 R"("},"b":{"$ref":"#/$defs/)" + next + R"("}}},)";
  }
  refuse(chain + R"("2000":{"type":"null"}}})", "nested too deep");
  refuse(doubled + R"("60":{"type":"null"}}})", "states");
  std::string mutual = R"({"$ref":"#/$defs/0","$defs":{)";
  for (int i = 0; i < 30; ++i) {
    mutual += (i > 0 ? ",\"" : "\"") + std::to_string(i) + R"(":{"properties":{)";
    for (int j = 0; j < 30; ++j)
      mutual += (j > 0 ? ",\"p" : "\"p") + std::to_string(j) + R"(":{"$ref":"#/$defs/)" +
                std::to_string(j) + R"("})";
    mutual += "}}";
  }
  refuse(mutual + "}}", "");
  refuse(R"({"type":"number","multipleOf":1e-300})", "");
  refuse(R"({"$id":"::","$ref":"../..//%zz#%41"})", "");
}

}  // namespace

int main() {
  accepts_what_is_valid();
  refuses_by_name();
  survives_hostile_schemas();
  if (failures == 0) std::printf("compile_schema_test: all passed\n");
  return failures == 0 ? 0 : 1;
}
