//! The view on a terminal, until a key ends it.

use std::io;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::runtime::Runtime;
use tokio::sync::watch::{self, Receiver};
use tokio::time::{sleep, timeout};

use crate::client::{self, Client};
use crate::top::draw::draw;
use crate::top::history::History;
use crate::top::sample::Sample;

/// Between two looks at the server.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a key may wait for a new figure.
const TICK: Duration = Duration::from_millis(100);

/// Shows the figures of the server at `url` until q, Esc or Ctrl-C; the terminal is then as it was.
///
/// # Errors
///
/// If the terminal fails.
pub fn watch(runtime: &Runtime, client: Client, url: &str) -> io::Result<()> {
    let (sender, mut figures) = watch::channel(History::default());
    let asking = runtime.spawn(async move {
        loop {
            let answer = match timeout(PATIENCE, Sample::of(&client)).await {
                Ok(answer) => answer.map_err(|status| client::said(&status)),
                Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
            };
            sender.send_modify(|history| history.push(answer));
            sleep(INTERVAL).await;
        }
    });
    // Also restores the terminal where a panic ends the program.
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, &mut figures, url);
    ratatui::restore();
    asking.abort();
    shown
}

fn show(
    terminal: &mut DefaultTerminal,
    figures: &mut Receiver<History>,
    url: &str,
) -> io::Result<()> {
    loop {
        terminal.draw(|frame| draw(frame, url, &figures.borrow_and_update()))?;
        loop {
            if event::poll(TICK)? {
                match event::read()? {
                    Event::Key(key) if leaves(key) => return Ok(()),
                    Event::Resize(..) => break,
                    _ => {}
                }
            }
            if figures.has_changed().unwrap_or(false) {
                break;
            }
        }
    }
}

fn leaves(key: KeyEvent) -> bool {
    let ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press
        && (ctrl_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}
