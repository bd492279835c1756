// generate BUNDLE NEW_TOKENS PROMPT prints the generated text to stdout while it is generated, and
// the number of passes to stderr. Ctrl-C ends the request early.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"

	"example.com/dlm"
)

func main() {
	if len(os.Args) != 4 {
		usage()
	}
	count, err := strconv.ParseInt(os.Args[2], 10, 32)
	if err != nil || count < 0 {
		usage()
	}
	if err := generate(os.Args[1], int(count), os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: generate BUNDLE NEW_TOKENS PROMPT")
	os.Exit(2)
}

func generate(path string, count int, prompt string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	bundle, err := dlm.Open(path, 0)
	if err != nil {
		return err
	}
	defer bundle.Close()
	session, err := bundle.NewSession()
	if err != nil {
		return err
	}
	defer session.Close()
	printed := func(delta string) bool {
		_, err := fmt.Print(delta)
		return err == nil
	}
	out, err := session.GenerateText(ctx, prompt, dlm.Options{MaxNewTokens: count, OnText: printed})
	if err != nil {
		return err
	}
	fmt.Println()
	fmt.Fprintf(os.Stderr, "%d passes, %s, %s\n", out.Passes, out.Finish, bundle.Engine())
	return nil
}
