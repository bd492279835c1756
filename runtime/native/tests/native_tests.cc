// Runs one of the tests in tests.h: native_tests NAME [ARGUMENT...]. The tests are one program,
// because linking each of them with the library's sources takes longer than compiling it.
#include <cstdio>
#include <map>
#include <string>

#include "tests.h"

int main(int count, char** arguments) {
  const std::map<std::string, int (*)(int, char**)> tests = {

      {"constraint_test", constraint_test},
      {"draw_test", draw_test},
      {"native_test", native_test},
      {"runner_test", runner_test},
      {"text_test", text_test},
      {"threads_test", threads_test}};
  const auto found = tests.find(count > 1 ? arguments[1] : "");
  if (found != tests.end()) return found->second(count - 1, arguments + 1);
  std::fprintf(stderr, "usage: native_tests NAME [ARGUMENT...], with one of these names:\n");
  for (const auto& [name, test] : tests) std::fprintf(stderr, "  %s\n", name.c_str());
  return 2;
}
