// Tests of grammars in GBNF, JSON Lines, CSV and XML: the texts that they accept, the error
// messages for invalid input, and the cost of hostile input. With -DDLM_SANITIZE, the program is
// built with sanitizers.
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "compile/automata/automata.h"
#include "compile/grammar/grammar.h"
#include "compile/schema/schema.h"

namespace {

using namespace dlm;
using namespace dlm::compile;
using Depth = std::optional<uint32_t>;

int failures = 0;

void expect(bool is_right, const std::string& what) {
  if (is_right) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.substr(0, 400).c_str());
}

Limits limits() {
  Limits made;
  made.seconds = 5;
  made.memory_bytes = size_t{512} << 20;
  return made;
}

Node compiled(Expressions& expressions, const std::string& content, Depth depth) {
  if (content[0] != '{') return grammar(expressions, content, depth);
  schema::Options options;
  options.max_depth = depth;
  return schema::tree_texts(expressions, content, options).node;
}

// Checks a grammar. If the content starts with a brace, it is a tree.
void check(const std::string& content, const std::vector<std::string>& valid,
           const std::vector<std::string>& invalid, Depth depth = std::nullopt) {
  Budget budget(limits(), "grammar");
  Expressions expressions(budget);
  try {
    Automata automata(expressions);
    const ByteAutomaton& texts = automata.of(compiled(expressions, content, depth));
    for (const std::string& text : valid)
      expect(texts.matches(text), content + " should accept " + text);
    for (const std::string& text : invalid)
      expect(!texts.matches(text), content + " should not accept " + text);
  } catch (const Error& error) {
    expect(false, content + ": " + error.what());
  }
}

// Expects that compiling throws an Error whose message contains `part`. If `part` is "", compiling
// may also succeed.
void refuse(const std::string& content, const std::string& part, Depth depth = std::nullopt) {
  Budget budget(limits(), "grammar");
  Expressions expressions(budget);
  try {
    Automata automata(expressions);
    automata.of(compiled(expressions, content, depth));
    expect(part.empty(), content + " should be refused");
  } catch (const Error& error) {
    expect(error.status() == DLM_INVALID_ARGUMENT, content + ": status");
    expect(std::string(error.what()).find(part) != std::string::npos,
           content + ": " + error.what());
  }
}

std::string repeated(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

void grammars_accept_their_texts() {
  check("root ::= \"a\" [b-d]+ | [^a\\n] .?  # two", {"ab", "abcd", "x", "xy", "\xC3\xA9z"},
        {"a", "", "abe", "\n", "xyz"});
  check("root ::= (\"a\" |\n  \"b\"){2,3}\n\n\nother ::= \"x\"", {"ab", "bba"}, {"a", "abab"});
  check("root ::= \"a\"{2} \"b\"{1,} \"c\"?", {"aab", "aabbc"}, {"ab", "aa"});
  check("root ::= x x\nx ::= | \"\\x41\\u00e9\\\"\\\\\\[\\]\\t\"", {"", "A\xC3\xA9\"\\[]\t"},
        {"A"});
  // Recursion at the end of a rule is not limited.
  check("root ::= item (\",\" root)?\nitem ::= [0-9]+", {"1", repeated("12,", 50) + "3"},
        {"1,", ""}, 0);
  check("root ::= \"a\" even | \"b\" root | \"\"\neven ::= \"a\" root | \"b\" even",
        {"", "aa", "babba", "bb"}, {"a", "ab", "baaa"}, 0);
  check("root ::= ws \"x\" ws\nws ::= | \" \" ws", {"x", "   x  "}, {"", "  "}, 0);
  // The depth limits recursive references that are not at the end of a rule.
  const std::string sums =
      "root ::= term (\"+\" term)*\nterm ::= factor (\"*\" factor)*\n"
      "factor ::= [0-9] | \"(\" root \")\"";
  check(sums, {"1", "1+2*3", "(1+2)*3", "((1))", "(((1)+2)*3)"}, {"", "(1", "1)", "((((1))))"});
  check(sums, {"1*2+3*4"}, {"(1)"}, 0);
  check(sums, {"(1)"}, {"((1))"}, 1);
  check("root ::= \"(\" root \")\" | \"x\"", {"x", "(x)", "((x))"}, {"(x", "(((x)))"}, 2);
  check("root ::= a \"x\"\na ::= \"a\" root | \"b\"", {"bx", "abxx", "aabxxx"}, {"ax", "abx"});
}

void grammars_are_refused_by_name() {
  refuse("", "line 1, column 1: no rule 'root'");
  refuse("a ::= \"x\"", "no rule 'root'");
  refuse("root ::= \"x\"\n  | y \"z\"", "line 2, column 3: expected the name of a rule");
  refuse("root ::= y \"z\"", "line 1, column 10: rule 'y' is not defined");
  refuse("root ::= \"x\"\nroot ::= \"y\"", "line 2, column 1: rule 'root' is defined twice");
  refuse("root ::= root \"x\" | \"y\"", "line 1, column 10: left recursion: rule 'root'");
  refuse("root ::= a\na ::= [x]* (\"\" | b)\nb ::= a", "left recursion");
  refuse("root ::= \"\xC3\xA9\" ;",
         "line 1, column 14: expected a part of the rule, or a new line");
  refuse("root ::= \"x", "expected the \" of a text, not the end");
  refuse("root ::= [x", "expected the ] of a set");
  refuse("root ::= [z-a]", "a range of characters ends below");
  refuse("root ::= \"\\q\"", "line 1, column 11: an unknown escape");
  refuse("root ::= \"\\ud800\"", "an escape that is not a character");
  refuse("root ::= (\"x\"", "expected the ) of a group");
  refuse("root ::= \"x\"{3,2}", "a count ends below its start");
  refuse("root ::= * \"x\"", "nothing to repeat");
  refuse("root ::= <think>", "references to tokens are not supported");
  refuse("root ::= \"\xFF\"", "bytes that are not UTF-8");
  refuse("root : \"x\"", "expected ::=");
  refuse("root ::= \"(\" root \")\"", "rule 'root' has no text within max_depth 3");
}

void records_accept_their_texts() {
  check(R"({"json_lines":{"type":"integer"},"low":0,"high":2})", {"", "1", "1\n-2"},
        {"1\n", "1\n2\n3", "\n"});
  const std::string row =
      R"({"type":"object","properties":{"n":{"type":"integer"},"s":{"type":["string","null"]}},"required":["s"]})";
  check(R"({"csv":)" + row + "}",
        {"n,s\n1,x", "n,s\n,", "n,s\n1,\"a,b\"", "n,s\n1,\"\"\"\"\n2,\"a\nb\"", "n,s\n1,a b"},
        {"n,s", "1,x", "n,s\n1,\"a\"", "n,s\n1,a\"b", "n,s\nx,y", "n,s\n1,x\n"});
  check(R"({"csv":)" + row + R"(,"header":false,"delimiter":";","line_end":"\r\n","high":2})",
        {"1;x", "1;a,b\r\n2;\"a;b\""}, {"1;x\n2;y", "1;x\r\n1;x\r\n1;x", "1;a;b"});
  check(R"({"csv":{"type":"object","properties":{"a":{"enum":["","x\"y"]}},"required":["a"]}})",
        {"a\n\"\"", "a\n\"x\"\"y\""}, {"a\n", "a\nx\"y"});
  const std::string order =
      R"({"xml":{"type":"object","xml":{"name":"order"},"required":["id","item"],"properties":{)"
      R"("id":{"type":"string","xml":{"attribute":true}},)"
      R"("item":{"type":"array","minItems":1,"items":{"$ref":"#/$defs/text"}},)"
      R"("tags":{"type":"array","maxItems":2,"items":{"enum":["a"],"xml":{"name":"tag"}},"xml":{"wrapped":true}},)"
      R"("paid":{"type":"boolean"}},"$defs":{"text":{"type":"string","maxLength":3}}}})";
  check(
      order,
      {R"(<order id="1"><item>x</item></order>)",
       R"(<order id="&quot;&#10;&lt;"><item></item><item>&amp;&gt;'</item><paid>true</paid></order>)",
       R"(<order id=""><item>x</item><tags></tags></order>)",
       R"(<order id=""><item>x</item><tags><tag>a</tag></tags><paid>false</paid></order>)"},
      {R"(<order><item>x</item></order>)", R"(<order id="1"></order>)",
       R"(<order id="<"><item>x</item></order>)", R"(<order id=""><item>&</item></order>)",
       R"(<order id=""><item>xxxx</item></order>)", "<order id=\"\"><item>\x08</item></order>"});
  check(R"({"xml":{"$ref":"#/$defs/n","$defs":{"n":{"type":"object","xml":{"name":"n"},)"
        R"("properties":{"n":{"$ref":"#/$defs/n"}}}}}})",
        {"<n></n>", "<n><n></n></n>", "<n><n><n></n></n></n>"}, {"<n><n><n><n></n></n></n></n>"},
        2);
  check(R"({"sequence":[{"text":"<"},{"grammar":"root ::= \"a\" | \"b\""},{"text":">"}]})",
        {"<a>", "<b>"}, {"a"});
}

void records_are_refused_by_name() {
  refuse(R"({"csv":{"type":"integer"}})", "csv: #: a row is a schema of type object");
  refuse(R"({"csv":{"type":"object","properties":{"a":{"type":"array"}}}})",
         "csv: #/properties/a: csv has only strings");
  refuse(R"({"csv":{"type":"object","properties":{"a":{"type":"null"}},"minProperties":1}})",
         "keyword 'minProperties' is not supported here in csv");
  refuse(R"({"csv":{"type":"object","properties":{"a":{"type":"null"}},"required":["b"]}})",
         "not one of the properties");
  refuse(R"({"csv":{"type":"object","properties":{"a":{"type":"null"}}},"delimiter":"x"})",
         "delimiter: expected one of");
  refuse(R"({"xml":{"type":"string"}})", "give the root element a name");
  refuse(R"({"xml":{"type":"string","xml":{"name":"a b"}}})", "is not a name of an element");
  refuse(R"({"xml":{"type":"string","xml":{"name":"a","prefix":"x"}}})", "prefix");
  refuse(R"({"xml":{"type":"object","xml":{"name":"a"},"properties":{"b":{}}}})",
         "xml has only strings");
  refuse(R"({"json_lines":{"type":"integer"},"low":3,"high":2})", "low is above high");
}

void survives_hostile_input() {
  refuse("root ::= " + repeated("(", 100'000), "groups are inside each other");
  refuse("root ::= " + repeated("\"a\" ", 300'000), "larger than 1 MiB");
  refuse("root ::= " + repeated("(", 200) + "\"a\"" + repeated("*)", 200), "");
  std::string many, chain, dense, doubled = "root ::= a0\n";
  for (int i = 0; i < 1001; ++i) many += "r" + std::to_string(i) + " ::= \"a\"\n";
  refuse(many, "more than 1000 rules");
  for (int i = 0; i < 990; ++i)
    chain += (i == 0 ? "root" : "r" + std::to_string(i)) + " ::= \"a\" r" + std::to_string(i + 1) +
             " \"b\"\n";
  refuse(chain + "r990 ::= root | \"x\"", "");
  for (int i = 0; i < 30; ++i) {
    dense += (i == 0 ? "root" : "r" + std::to_string(i)) + " ::= \"x\"";
    for (int j = 1; j < 30; ++j)
      dense += " | \"" + std::to_string(i * j) + "\" r" + std::to_string(j);
    dense += "\n";
    const std::string next = " a" + std::to_string(i + 1);
    doubled += "a" + std::to_string(i) + " ::= \"a\"" + next + " \"b\"" + next + "\n";
  }
  refuse(dense, "");
  refuse(doubled + "a30 ::= \"x\"", "make counts smaller");
  refuse(repeated("root ::= \"x\"{1000000} ", 1) + repeated("{1000}", 3), "");
  std::string deep = R"({"xml":{"type":"object","xml":{"name":"a"},"$ref":"#/$defs/0","$defs":{)";
  for (int i = 0; i < 60; ++i)
    deep += "\"" + std::to_string(i) + R"(":{"type":"object","properties":{"a":{"$ref":"#/$defs/)" +
            std::to_string(i + 1) + R"("},"b":{"$ref":"#/$defs/)" + std::to_string(i + 1) +
            R"("}}},)";
  refuse(deep + R"("60":{"type":"null"}}}})", "");
}

}  // namespace

int main() {
  grammars_accept_their_texts();
  grammars_are_refused_by_name();
  records_accept_their_texts();
  records_are_refused_by_name();
  survives_hostile_input();
  if (failures == 0) std::printf("compile_grammar_test: all passed\n");
  return failures == 0 ? 0 : 1;
}
