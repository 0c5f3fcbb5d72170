//! `tandem top`: a server's figures in the terminal.

use std::fs;

use anyhow::{Context, Result, anyhow};
use terminal::top::{self, Sample};
use terminal::{Client, ServerAddress};
use tokio::runtime::Runtime;

use crate::cli::{ClientArgs, TopArgs};
use crate::output;

pub(crate) fn run(args: &TopArgs) -> Result<()> {
    let runtime = Runtime::new()?;
    let client = client(&runtime, &args.connect, &args.client)?;
    if !args.once && !args.json {
        return top::watch(&runtime, client, &args.connect).context("the terminal failed");
    }
    let sample = runtime.block_on(Sample::of(&client));
    let sample =
        sample.map_err(|status| anyhow!("{}: {}", args.connect, terminal::said(&status)))?;
    match args.json {
        true => output::json_line(&sample.to_json()),
        false => output::text(&top::text(&sample)),
    }
}

/// A client of the server at `url`.
pub(crate) fn client(runtime: &Runtime, url: &str, args: &ClientArgs) -> Result<Client> {
    let ClientArgs { api_key_file, tls_ca } = args;
    let read_key =
        |file| fs::read_to_string(file).with_context(|| format!("--api-key-file {file:?}"));
    let read_ca = |file| fs::read(file).with_context(|| format!("--tls-ca {file:?}"));
    let address = ServerAddress {
        url: url.to_owned(),
        api_key: api_key_file.as_ref().map(read_key).transpose()?.map(|key| key.trim().to_owned()),
        tls_ca: tls_ca.as_ref().map(read_ca).transpose()?,
    };
    let _context = runtime.enter();
    Client::new(&address).map_err(|fault| anyhow!("--connect {fault}"))
}
