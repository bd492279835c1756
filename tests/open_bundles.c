/* Opens bundles, and prints "STATUS<tab>MESSAGE" for each. If a bundle can be opened, this also
 * includes opening its compiled text file. Usage: open_bundles ENGINE BUNDLE [ENGINE BUNDLE]... */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "dlm_runtime.h"

int main(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i += 2) {
    char message[2048] = "";
    dlm_bundle* bundle = NULL;
    dlm_open_options options;
    dlm_open_options_init(&options, sizeof options);
    options.engine = argv[i];
    options.threads = 1;
    alarm(60); /* ends the program if it hangs; opening a bundle never takes 60 seconds */
    dlm_status status = dlm_bundle_open(argv[i + 1], &options, message, sizeof message, &bundle);
    const dlm_text* text = NULL;
    if (!status && strstr(dlm_bundle_describe(bundle)->manifest, "\"text.bin\""))
      status = dlm_bundle_text(bundle, message, sizeof message, &text);
    printf("%s\t%s\n", dlm_status_name(status), message);
    fflush(stdout);
    dlm_bundle_destroy(bundle);
  }
  return 0;
}
